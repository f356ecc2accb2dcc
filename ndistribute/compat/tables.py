"""Tables that say where TensorFlow's names are found; the namespaces read them.

The path of a namespace is in brackets. The table of TensorFlow 1 has the names that TensorFlow 2
lacks, or that mean something else there.
"""

from __future__ import annotations

TF2 = """
[compat] .compat.array_functions: as_bytes as_str=as_text as_text
[config] .compat.signatures: experimental_connect_to_cluster=nothing
    experimental_run_functions_eagerly=nothing run_functions_eagerly=nothing
    set_soft_device_placement=nothing  .compat.configuration: get_visible_devices=list_devices
    list_physical_devices=list_devices LogicalDevice LogicalDeviceConfiguration
    list_logical_devices set_logical_device_configuration
[config.experimental] .compat.tf.config: list_logical_devices list_physical_devices
    VirtualDeviceConfiguration=LogicalDeviceConfiguration
    set_virtual_device_configuration=set_logical_device_configuration
    .compat.signatures: enable_op_determinism=nothing set_memory_growth=nothing
[config.optimizer] .compat.signatures: set_experimental_options=nothing set_jit=nothing
[config.threading] .compat.signatures: set_inter_op_parallelism_threads=nothing
    set_intra_op_parallelism_threads=nothing
[data] .compat.adapters: Dataset=TensorDataset Options TextLineDataset
    .data: AUTOTUNE INFINITE_CARDINALITY UNKNOWN_CARDINALITY
[data.experimental] .data: AUTOTUNE INFINITE_CARDINALITY UNKNOWN_CARDINALITY
    .compat.adapters: Counter CsvDataset cardinality make_csv_dataset rejection_resample
    ndistribute: AutoShardPolicy
[bitwise] numpy/binary: bitwise_and bitwise_or bitwise_xor left_shift right_shift  numpy/unary:
    invert
[autograph] .compat.signatures: set_verbosity=nothing
[autograph.experimental] .compat.signatures: set_loop_options=nothing  .compat.adapters:
    do_not_convert
[debugging] numpy/asserting: assert_equal=equal assert_greater=greater
    assert_greater_equal=greater_equal assert_less=less assert_less_equal=less_equal
    assert_near=isclose assert_non_negative=greater_equal assert_none_equal=not_equal
    assert_positive=greater  .compat.signatures: enable_check_numerics=nothing
    set_log_device_placement=nothing  .compat.tensor_functions: Assert=check_true
    .compat.tensor_functions/unary: assert_all_finite=check_numerics check_numerics
[image] .compat.image_functions/unary: * stateless_random_brightness=random_brightness
    stateless_random_contrast=random_contrast stateless_random_crop=random_crop
    stateless_random_flip_left_right=random_flip_left_right
    stateless_random_flip_up_down=random_flip_up_down stateless_random_saturation=random_saturation
    .compat.files: decode_bmp=decode_image decode_image decode_jpeg=decode_image
    decode_png=decode_image
[image.ResizeMethod] text: BILINEAR=bilinear NEAREST_NEIGHBOR=nearest
[signal] numpy.fft/unary: fft fft2d=fft2 ifft ifft2d=ifft2 irfft irfft2d=irfft2 rfft rfft2d=rfft2
[strings] .compat.array_functions/unary: length=text_length lower regex_replace split=text_split
    to_number  .compat.array_functions/operation: join=text_join  numpy.strings/unary: strip
[UnconnectedGradients] text: NONE=none ZERO=zero
[version] .compat.tf: GIT_VERSION=__version__ VERSION=__version__
[distribute] .compat.strategies: StrategyExtended get_replica_context get_strategy  ndistribute:
    CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
    HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode NcclAllReduce ReduceOp
    ReductionToOneDevice ReplicaContext RunOptions Strategy experimental_set_strategy=set_strategy
    has_strategy in_cross_replica_context  ndistribute/server: Server  ndistribute/strategy:
    CentralStorageStrategy MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy
    ParameterServerStrategy TPUStrategy
[distribute.cluster_resolver] .cluster: ClusterResolver  ndistribute: KubernetesClusterResolver
    SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver UnionResolver
    ndistribute/resolver: TPUClusterResolver
[distribute.coordinator] ndistribute: ClusterCoordinator PerWorkerValue RemoteValue
    PerWorkerValues=PerWorkerValue
[distribute.experimental] .compat.tf.distribute/by_communication: MultiWorkerMirroredStrategy
    .compat.tf.distribute: CentralStorageStrategy MirroredStrategy OneDeviceStrategy
    ParameterServerStrategy TPUStrategy coordinator  ndistribute:
    CollectiveCommunication=CommunicationImplementation CommunicationImplementation
    CommunicationOptions  .models: TerminationConfig  .compat.configuration:
    PreemptionCheckpointHandler=preemption_handler PreemptionWatcher  ndistribute:
    CollectiveHints=CommunicationOptions ValueContext=ReplicaContext
[distribute.experimental.partitioners] .variables.partitioners: *
[dtypes] .compat.graphs: as_dtype=dtype_of  .compat.tensor_functions: cast  numpy: DType=dtype
    numpy/dtype: bool=bool_ complex128 complex64 double=float64 float16 float32 float64 half=float16
    int16 int32 int64 int8 string=str_ uint16 uint32 uint64 uint8
[errors] builtins: OutOfRangeError=StopIteration  .errors: AbortedError CancelledError
    DataLossError=CheckpointCorruptError DeadlineExceededError FailedPreconditionError
    InvalidArgumentError NotFoundError OpError=DistributeError UnavailableError=WorkerLostError
    UnauthenticatedError=AuthenticationError  .compat.op_errors: *
[estimator] .estimator: BinaryClassHead=binary_class_head DNNClassifier DNNEstimator
    DNNLinearCombinedClassifier DNNLinearCombinedEstimator DNNLinearCombinedRegressor DNNRegressor
    Estimator EstimatorSpec EvalSpec LinearClassifier LinearEstimator LinearRegressor ModeKeys
    MultiClassHead=multi_class_head RegressionHead=regression_head RunConfig TrainSpec
    WarmStartSettings add_metrics train_and_evaluate  .graph.hooks: *
[estimator.experimental] .estimator.early_stopping: *
[feature_column] .estimator.feature_column: bucketized_column categorical_column_with_hash_bucket
    categorical_column_with_identity categorical_column_with_vocabulary_list crossed_column
    embedding_column indicator_column numeric_column
[io] .compat.files: decode_bmp=decode_image decode_image decode_jpeg=decode_image
    decode_png=decode_image read_file
[io.gfile] os/file: listdir mkdir remove stat walk  os.path: exists isdir join  glob: glob
    builtins/file: GFile=open  .compat.adapters/file: copy makedirs rename rmtree
[keras] .compat.adapters: Input Model Sequential
[keras.applications]
[keras.datasets]
[keras.activations] .models.activations: * swish=silu
[keras.backend] .compat.keras_functions: concatenate=joined_last flatten function int_shape=shape
    .compat.signatures: clear_session=nothing .compat.tf.random: random_normal=normal
    random_uniform=uniform .compat.adapters: backend epsilon floatx image_data_format
    .compat.tensor_functions: cast clip=clip_by_value dot=matmul expand_dims get_value ones
    set_value zeros .compat.tf.math: abs argmax equal exp log max=reduce_max maximum
    mean=reduce_mean min=reduce_min minimum pow round sigmoid sqrt square std=reduce_std
    sum=reduce_sum tanh .compat.tf.nn: relu softmax .compat.tf: constant reshape shape stack
    transpose variable=Variable
[keras.config] .compat.adapters: backend epsilon floatx image_data_format
    .models.layers: set_dtype_policy set_floatx=set_dtype_policy
[keras.callbacks] .models.callbacks/callback: *  .models.callbacks: Callback History LambdaCallback
[keras.estimator] .estimator: model_to_estimator
[keras.initializers] .models.initializers: * constant=Constant glorot_normal=GlorotNormal
    glorot_uniform=GlorotUniform he_normal=HeNormal he_uniform=HeUniform ones=Ones zeros=Zeros
[keras.layers] .models.layers/layer: * AveragePooling1D=AveragePool1D
    AveragePooling2D=AveragePool2D Convolution2D=Conv2D GlobalAveragePooling1D=GlobalAveragePool1D
    GlobalAveragePooling2D=GlobalAveragePool2D GlobalMaxPooling1D=GlobalMaxPool1D
    GlobalMaxPooling2D=GlobalMaxPool2D MaxPooling1D=MaxPool1D MaxPooling2D=MaxPool2D
    .compat.keras_objects: deserialize=deserialize_object serialize=serialize_object
    .compat.adapters: Input InputLayer=Input SyncBatchNormalization  .compat.keras_layers: Layer
[keras.losses] .models.losses/loss: * MAE=mean_absolute_error MSE=mean_squared_error
    mae=mean_absolute_error mse=mean_squared_error .models.losses: deserialize .names: serialize
[keras.losses.Reduction] text: AUTO=sum_over_batch_size NONE=none SUM=sum
    SUM_OVER_BATCH_SIZE=sum_over_batch_size
[keras.metrics] .models.metrics/metric: * .models.metrics: deserialize get .compat.keras_layers:
    Metric=OwnMetric .names: serialize
[keras.mixed_precision] .compat.keras_precision: LossScaleOptimizer Policy global_policy
    .models.layers: set_global_policy=set_dtype_policy
[keras.models] .compat.adapters: Model Sequential save_model
    .compat.keras_objects: load_model model_from_json  .models: clone_model
[keras.ops] numpy/keras: abs absolute add all any arange argmax argmin argsort average broadcast_to
    ceil clip concatenate conj conjugate cos cosh count_nonzero cross cumprod cumsum diag diagonal
    diff digitize divide dot einsum equal exp expand_dims expm1 eye flip floor floor_divide full
    full_like greater greater_equal hstack isclose isfinite isinf isnan less less_equal linspace log
    log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor matmul max maximum
    mean median meshgrid min minimum mod moveaxis multiply nan_to_num ndim negative nonzero
    not_equal ones ones_like outer pad power prod quantile ravel reciprocal repeat reshape roll
    round searchsorted sign sin sinh size sort split sqrt square squeeze stack std subtract sum
    swapaxes take take_along_axis tan tanh tensordot tile trace transpose tri tril triu true_divide
    var vdot vstack where zeros zeros_like arccos arcsin arctan arctan2
    numpy.linalg/keras: cholesky det eigh inv norm qr solve svd
    .compat.tf.nn: elu gelu in_top_k leaky_relu log_sigmoid log_softmax moments relu relu6 selu
    sigmoid silu softmax softplus softsign swish  .compat.tf.math: divide_no_nan erf
    logsumexp=reduce_logsumexp rsqrt segment_sum top_k  .compat.tf: cast cond convert_to_tensor
    custom_gradient scatter=scatter_nd scatter_update=tensor_scatter_nd_update slice stop_gradient
    unstack vectorized_map  .compat.keras_functions: convert_to_numpy one_hot
    shape  .models.losses/loss: categorical_crossentropy sparse_categorical_crossentropy
[keras.ops.image] .compat.keras_functions: extract_patches  .compat.tf.image: resize
[keras.ops.nn] .compat.tf.nn: gelu log_softmax relu sigmoid silu softmax
[keras.optimizers] .optimizers/optimizer: *  .optimizers: Optimizer
    .compat.keras_objects: get=get_optimizer deserialize=deserialize_optimizer  .names: serialize
[keras.optimizers.legacy] .compat.tf.keras.optimizers: *
[keras.optimizers.schedules] .optimizers.schedules: *  .names: serialize
[keras.preprocessing] .compat.files: image_dataset_from_directory text_dataset_from_directory
    timeseries_dataset_from_array
[keras.preprocessing.image] .compat.files: array_to_img img_to_array load_img save_img
[keras.preprocessing.sequence] .compat.array_functions: pad_sequences
    .compat.random_numbers: make_sampling_table skipgrams
[keras.random] .compat.keras_functions: SeedGenerator categorical dropout normal randint uniform
[keras.regularizers] .models.regularizers: * l1=L1 l2=L2
[keras.saving] .compat.adapters: save_model .compat.keras_objects: load_model
    deserialize_keras_object=deserialize_object serialize_keras_object=serialize_object .names:
    CustomObjectScope=custom_object_scope custom_object_scope get_custom_objects
    get_registered_name=registered_name register_keras_serializable
[keras.utils] ndistribute: set_random_seed=set_seed  .models: SidecarEvaluator
    .names: CustomObjectScope=custom_object_scope custom_object_scope get_custom_objects
    register_keras_serializable  .compat.array_functions: pad_sequences to_categorical
    .compat.keras_objects: deserialize_keras_object=deserialize_object
    serialize_keras_object=serialize_object PyDataset Sequence=PyDataset
    .compat.files: array_to_img image_dataset_from_directory img_to_array load_img plot_model
    save_img text_dataset_from_directory timeseries_dataset_from_array
[keras.utils.experimental] .models.batches: DatasetCreator
[initializers] .compat.tf.keras.initializers: *
[losses] .compat.tf.keras.losses: *
[metrics] .compat.tf.keras.metrics: *
[optimizers] .compat.tf.keras.optimizers: *
[linalg] .compat.array_functions/unary: band_part diag diag_part matrix_transpose
    .compat.array_functions/floating: l2_normalize svd  numpy/operation: einsum  numpy/binary:
    tensordot  numpy.linalg/floating: cholesky det eigh eigvalsh inv pinv qr slogdet
    numpy.linalg/binary: cross solve  .compat.tensor_functions: eye global_norm matmul norm
[math] .compat.array_functions/unary: confusion_matrix count_nonzero cumprod cumsum divide_no_nan
    segment_sum squared_difference top_k unsorted_segment_sum  .compat.array_functions/floating: erf
    l2_normalize log_sigmoid rsqrt softsign  .models.nn/last_axis: log_softmax softmax  numpy/unary:
    abs angle conj imag is_finite=isfinite is_inf=isinf is_nan=isnan logical_not negative real
    reciprocal round sign square  numpy/floating: acos=arccos acosh=arccosh asin=arcsin
    asinh=arcsinh atan=arctan atanh=arctanh ceil cos cosh exp expm1 floor log log1p rint sin sinh
    sqrt tan tanh  numpy/binary: add nextafter realdiv=divide truncatemod=fmod atan2=arctan2 divide
    equal floordiv=floor_divide floormod=remainder greater greater_equal less less_equal logical_and
    logical_or logical_xor maximum minimum mod=remainder multiply not_equal pow=power
    scalar_mul=multiply subtract truediv=divide  numpy/reduction: reduce_all=all reduce_any=any
    reduce_max=max reduce_mean=mean reduce_min=min reduce_prod=prod reduce_std=std reduce_sum=sum
    reduce_variance=var  numpy/index: argmax argmin  .models.nn/reduction:
    reduce_logsumexp=logsumexp  .models.activations/floating: softplus  .models.nn/floating: sigmoid
    .compat.tensor_functions: accumulate_n=add_n add_n in_top_k  .compat.graphs/operation:
    zero_fraction
[nest] .compat.nests: *
[nn] .compat.array_functions/unary: moments relu relu6 top_k  .compat.array_functions/floating:
    batch_normalization gelu l2_normalize log_sigmoid selu softsign  .models.activations/floating:
    elu softplus  .models.nn/floating: sigmoid silu swish=silu  numpy/floating: tanh
    .compat.tensor_functions: bias_add dropout embedding_lookup in_top_k l2_loss leaky_relu
    sigmoid_cross_entropy_with_logits=sigmoid_loss softmax_cross_entropy_with_logits=softmax_loss
    sparse_softmax_cross_entropy_with_logits=softmax_loss  .compat.graphs/unary: avg_pool
    avg_pool2d=avg_pool conv2d max_pool max_pool2d=max_pool zero_fraction  .models.losses/loss:
    compute_average_loss scale_regularization_loss  .models.nn/last_axis: log_softmax softmax
[random] .compat.random_numbers: Generator categorical gamma get_global_generator
    log_uniform_candidate_sampler shuffle split stateless_normal stateless_truncated_normal
    stateless_uniform  ndistribute: set_seed  .compat.random_numbers/either: normal truncated_normal
    uniform
[random.experimental] .compat.random_numbers: Generator get_global_generator
    stateless_split=split
[saved_model] .compat.adapters: save=save_model  .compat.keras_objects: load=load_model
    .compat.configuration: LoadOptions=FileOptions SaveOptions=FileOptions
[summary] .summaries: SummaryWriter=SummaryFile create_file_writer=SummaryFile flush
    histogram image record_if scalar should_record_summaries text
[train] ndistribute: CheckpointManager ClusterSpec  .compat.adapters: Checkpoint
    .compat.configuration: CheckpointOptions=FileOptions  .models: list_variables load_checkpoint
    load_variable  .compat.tensor_functions/either: ExponentialMovingAverage latest_checkpoint
    .graph: Coordinator get_checkpoint_state
[tpu]
[tpu.experimental] ndistribute: initialize_tpu_system
[] .compat.tf.dtypes: *  .compat.tf.math: *  .compat.tf.linalg: einsum eye matmul norm tensordot
    ndistribute: VariableAggregation VariableSynchronization  ndistribute/unary: stop_gradient
    .compat.tensors: GradientTape=WatchingTape Tensor convert_to_tensor
    .compat.tensor_functions/variable: Variable  .compat.tensor_functions: Assert=check_true
    IndexedSlices custom_gradient get_static_value=get_value TensorArray TensorSpec
    clip_by_global_norm clip_by_value complex=complex_number expand_dims fill gather identity
    is_tensor one_hot ones range=numbers slice=slice_ split squeeze tile transpose unstack where
    zeros  .compat.functions: Module function  .compat.tensor_functions/either: cond constant
    control_dependencies group no_op numpy_function py_function  .compat.array_functions/unary:
    argsort boolean_mask broadcast_to clip_by_norm ensure_shape gather_nd linspace pad saturate_cast
    sequence_mask sort tensor_scatter_nd_add tensor_scatter_nd_max tensor_scatter_nd_min
    tensor_scatter_nd_sub tensor_scatter_nd_update unique unique_with_counts
    .compat.array_functions/operation: map_fn meshgrid scatter_nd vectorized_map=map_fn
    numpy/unary: ones_like repeat reshape reverse=flip roll zeros_like  numpy/joining:
    concat=concatenate stack  numpy/counted: rank=ndim shape size  numpy: newaxis  .graph.shapes:
    TensorShape=Shape  builtins: print  time: timestamp=time  .compat.graphs: get_logger
    .compat.programs: init_scope  .compat.graphs/program: device name_scope while_loop
    .compat.programs/program: executing_eagerly  .models.initializers/initializer:
    constant_initializer=Constant ones_initializer=Ones random_normal_initializer=RandomNormal
    random_uniform_initializer=RandomUniform zeros_initializer=Zeros  .graph: Graph Operation
"""
TF1 = """
[app] .compat.tf1: flags  .compat.graphs: run
[contrib]
[contrib.framework] .graph: get_or_create_global_step
[contrib.layers] .compat.graphs: l2_regularizer xavier_initializer=glorot_uniform_initializer
    .compat.layers: flatten
[contrib.training] .graph: GreedyLoadBalancingStrategy byte_size_load_fn
[data] .compat.adapters/either: make_initializable_iterator=dataset_iterator
    make_one_shot_iterator=dataset_iterator
[estimator.inputs] .compat.graphs: numpy_input_fn
[feature_column] .estimator.feature_column: input_layer linear_model
[flags] .compat.graphs: DEFINE_bool=DEFINE_boolean DEFINE_boolean DEFINE_float
    DEFINE_integer DEFINE_string FLAGS
[GraphKeys] text: GLOBAL_STEP=global_step GLOBAL_VARIABLES=variables LOCAL_VARIABLES=local_variables
    LOSSES=losses METRIC_VARIABLES=metric_variables REGULARIZATION_LOSSES=regularization_losses
    SUMMARIES=summaries
    TRAINABLE_VARIABLES=trainable_variables UPDATE_OPS=update_ops VARIABLES=variables
[gfile] .compat.tf.io.gfile: *  builtins/file: FastGFile=open Open=open  glob: Glob=glob
    os/file: ListDirectory=listdir Remove=remove  os.path: Exists=exists IsDirectory=isdir
    .compat.adapters: DeleteRecursively=rmtree MakeDirs=makedirs
[layers] .compat.layers/graph: AveragePooling2D BatchNormalization Conv2D Dense Dropout Flatten
    MaxPooling2D average_pooling2d batch_normalization conv2d dense dropout flatten max_pooling2d
[logging] logging: DEBUG ERROR FATAL INFO WARN=WARNING  .compat.graphs: debug error info
    set_verbosity warn=warning warning
[losses] .compat.graphs/losses: absolute_difference get_regularization_loss get_total_loss
    huber_loss mean_squared_error sigmoid_cross_entropy softmax_cross_entropy
    sparse_softmax_cross_entropy
[metrics] .graph.streaming_metrics/graph: *
[math] .compat.graphs/operation: in_top_k
[nn] .compat.graphs/operation: in_top_k
    .compat.tensor_functions/either: dropout=dropout_v1
    .compat.tensor_functions: sigmoid_cross_entropy_with_logits=sigmoid_loss_v1
    softmax_cross_entropy_with_logits=softmax_loss_v1
    softmax_cross_entropy_with_logits_v2=softmax_loss
    sparse_softmax_cross_entropy_with_logits=sparse_softmax_loss_v1
[summary] .graph.summary/graph: histogram image merge merge_all scalar
    .graph.summary/writer: FileWriter SummaryWriter=FileWriter
[train] .graph/eagerly: AdagradOptimizer AdamOptimizer GradientDescentOptimizer MomentumOptimizer
    RMSPropOptimizer  .compat.tensor_functions/either: create_global_step=global_step
    get_or_create_global_step=global_step  ndistribute/server: Server
    .compat.signatures: start_queue_runners=nothing
    .compat.graphs: MonitoredTrainingSession=MonitoredBytesSession global_step
    .compat.graph_supervisor: Supervisor  .compat.graph_sessions: ChiefSessionCreator
    MonitoredSession SecondOrStepTimer SessionManager SingularMonitoredSession WorkerSessionCreator
    .estimator.specs: warm_start  .graph.variables: get_global_step=find_global_step
    .compat.tf.compat.v1.summary: SummaryWriter  .graph.hooks: *
    .graph: Optimizer Saver Scaffold SyncReplicasOptimizer exponential_decay init_from_checkpoint
    piecewise_constant polynomial_decay replica_device_setter
[] .compat.tensor_functions/either: get_variable global_variables_initializer
    glorot_uniform_initializer initialize_all_variables=global_variables_initializer
    initialize_local_variables=local_variables_initializer local_variables_initializer py_func
    random_normal_initializer random_uniform_initializer truncated_normal_initializer
    .compat.random_numbers/either: random_normal=normal random_uniform=uniform truncated_normal
    .compat.programs/program: disable_eager_execution=use_graphs disable_v2_behavior=use_graphs
    enable_eager_execution=use_arrays enable_v2_behavior=use_arrays
    .compat.graphs: Session=BytesSession add_to_collection assign assign_add
    assign_sub get_collection set_random_seed  .compat.graphs/operation: to_float
    to_int32 to_int64  types: RunMetadata=SimpleNamespace  .graph.session: GPUOptions RunOptions
    .compat.graphs/graph: placeholder  .graph: AUTO_REUSE ConfigProto all_variables=global_variables
    get_default_graph get_variable_scope global_variables gradients local_variables
    report_uninitialized_variables reset_default_graph trainable_variables variable_scope
    variables_initializer  .graph.summary: histogram_summary=histogram image_summary=image
    merge_all_summaries=merge_all merge_summary=merge scalar_summary=scalar
    numpy/binary: mul=multiply sub=subtract  numpy/unary: diag neg=negative
    numpy/joining: pack=stack  .compat.tensor_functions: div global_norm unpack=unstack
"""
INSTEAD = {
    "InteractiveSession": "tf.compat.v1.Session, in a with block",
    "RaggedTensor": "lists of arrays, or padded arrays",
    "SparseTensor": "tf.IndexedSlices, or whole arrays",
    "RegisterGradient": "tf.custom_gradient",
    "autodiff": "tf.GradientTape, and its jacobian",
    "bfloat16": "the policy 'mixed_bfloat16' of layers",
    "scan": "a loop, and tf.stack",
    "searchsorted": "numpy.searchsorted",
    "math.bincount": "numpy.bincount",
    "audio": "SciPy in Dataset.map",
    "contrib.rnn": "a model, and tf.keras.estimator.model_to_estimator",
    "data.FixedLengthRecordDataset": "Dataset.from_files with a reader",
    "data.TFRecordDataset": "Dataset.from_files with a reader",
    "data.experimental.assert_cardinality": "Dataset.cardinality",
    "data.experimental.bucket_by_sequence_length": "Dataset.padded_batch, of sorted elements",
    "data.experimental.dense_to_ragged_batch": "Dataset.padded_batch",
    "data.experimental.get_single_element": "next(iter(dataset))",
    "data.experimental.group_by_window": "Dataset.filter for each key, and choose_from_datasets",
    "data.experimental.ignore_errors": "a function that catches its errors, and Dataset.filter",
    "data.experimental.unique": "numpy.unique before Dataset.from_tensor_slices",
    "data.experimental.snapshot": "Dataset.cache, or numpy.save and Dataset.from_files",
    "estimator.*Exporter": "tf.keras.estimator.model_to_estimator, and nd.Model.export",
    "estimator.BoostedTrees*": "HistGradientBoostingClassifier or -Regressor of sklearn.ensemble",
    "estimator.Baseline*": "tf.estimator.LinearClassifier or LinearRegressor of a constant feature",
    "estimator.ProfilerHook": "the command ndistribute trace",
    "estimator.VocabInfo": "the same vocabulary in both models",
    "estimator.export": "tf.keras.estimator.model_to_estimator, and nd.Model.export",
    "estimator.tpu": "tf.keras.estimator.model_to_estimator of a model under TPUStrategy",
    "experimental": "NumPy for its numpy; the rest does not exist",
    "gradients": "tf.GradientTape, or tf.compat.v1.gradients in a graph",
    "hessians": "tape.jacobian of a gradient that another tape has recorded",
    "image.*hue": "Pillow in Dataset.map",
    "image.*hsv*": "Pillow in Dataset.map",
    "io.TFRecordWriter": "numpy.save or numpy.savez, and Dataset.from_files",
    "io.decode_csv": "tf.data.experimental.CsvDataset",
    "io.parse_*": "Dataset.from_files with a reader",
    "io.serialize_tensor": "numpy.save",
    "keras.applications.*": "layers, and load_weights: nothing is downloaded",
    "keras.datasets.*": "arrays that you load: nothing is downloaded",
    "keras.experimental": "tf.keras.Sequential, or tf.estimator.DNNLinearCombinedEstimator",
    "keras.layers.DenseFeatures": "tf.compat.v1.feature_column.input_layer in a graph",
    "keras.preprocessing.text": "tf.keras.layers.TextVectorization",
    "keras.constraints": "regularizers, or a callback that assigns variables",
    "keras.layers.AdditiveAttention": "MultiHeadAttention",
    "keras.layers.Attention": "MultiHeadAttention",
    "keras.layers.Dot": "Lambda of tf.einsum",
    "keras.layers.StackedRNNCells": "an RNN around each cell, in turn",
    "keras.layers.UnitNormalization": "Lambda of tf.math.l2_normalize",
    "keras.layers.Conv3D": "Conv2D of each slice, by TimeDistributed",
    "keras.layers.ConvLSTM2D": "RNN of a cell of your own, which may call Conv2D",
    "keras.utils.get_file": "files that you fetch: nothing is downloaded",
    "keras.utils.Progbar": "the progress bar of model.fit, or print",
    "keras.utils.split_dataset": "Dataset.take and Dataset.skip",
    "lite": "nd.models.load where the model serves",
    "lookup": "a dict in Dataset.map",
    "metrics.precision_at_k": "scikit-learn's metrics, on what Estimator.predict gives",
    "math.*gamma": "scipy.special.psi and gammaln, which have gradients",
    "math.erf*": "scipy.special.erfc and erfinv, which have gradients",
    "nn.*rnn*": "a model, and tf.keras.estimator.model_to_estimator",
    "profiler": "the command ndistribute trace",
    "queue": "a dataset",
    "ragged": "lists of arrays, or padded arrays",
    "random.set_global_generator": "tf.random.set_seed, or a Generator of your own",
    "signal.stft": "SciPy",
    "sparse": "tf.IndexedSlices, or whole arrays",
    "strings.bytes_split": "list(x.numpy().decode())",
    "strings.unicode_decode": "a list of ord(c) for c in x.numpy().decode()",
    "strings.unicode_split": "list(x.numpy().decode())",
    "variable_creator_scope": "a function that makes the variables",
    "summary.experimental": "step= of summaries, or of SummaryWriter.as_default",
    "summary.trace_*": "the command ndistribute trace",
    "test": "tf.config.list_physical_devices, and unittest or pytest",
    "train.Example": "arrays in .npz files, and Dataset.from_files",
    "saved_model.Builder": "tf.compat.v1.train.Saver, or nd.Model.export of a model",
    "saved_model.simple_save": "tf.compat.v1.train.Saver, or nd.Model.export of a model",
    "train.LooperThread": "Supervisor.loop",
    "train.ProfilerHook": "the command ndistribute trace",
    "train.QueueRunner": "a dataset",
    "train.SessionCreator": "tf.compat.v1.train.ChiefSessionCreator, or WorkerSessionCreator",
    "train.VocabInfo": "the same vocabulary in both models",
    "train.*batch": "Dataset.batch",
    "train.*input_producer": "Dataset.from_files",
}
"""What to use instead of names that do not exist, by their paths; * stands for any letters."""
