"""Where the names of TensorFlow are found: tables that `Names.fill` reads.

A namespace is in brackets. The table of TensorFlow 1 has what it names beside TensorFlow 2, or
means otherwise.
"""

from __future__ import annotations

TF2 = """
[compat]
[config] .compat.signatures: experimental_connect_to_cluster=nothing
    experimental_run_functions_eagerly=nothing run_functions_eagerly=nothing
    set_soft_device_placement=nothing  .compat.adapters: list_physical_devices=list_devices
    .compat.configuration: LogicalDevice LogicalDeviceConfiguration get_logical_device_configuration
    list_logical_devices set_logical_device_configuration
[config.experimental] .compat.tf.config: list_logical_devices list_physical_devices
    VirtualDeviceConfiguration=LogicalDeviceConfiguration
    get_virtual_device_configuration=get_logical_device_configuration
    set_virtual_device_configuration=set_logical_device_configuration
    .compat.signatures: enable_op_determinism=nothing set_memory_growth=nothing
[data] .compat.adapters: Dataset=TensorDataset Options TextLineDataset
    .data: AUTOTUNE INFINITE_CARDINALITY UNKNOWN_CARDINALITY
[data.experimental] .data: AUTOTUNE INFINITE_CARDINALITY UNKNOWN_CARDINALITY
    .compat.adapters: cardinality make_csv_dataset  ndistribute: AutoShardPolicy
[bitwise] numpy/binary: bitwise_and bitwise_or bitwise_xor left_shift right_shift
    numpy/unary: invert
[autograph] .compat.signatures: set_verbosity=nothing
[autograph.experimental] .compat.signatures: set_loop_options=nothing
    .compat.adapters: do_not_convert
[debugging] numpy/asserting: assert_equal=equal assert_greater=greater
    assert_greater_equal=greater_equal assert_less=less assert_less_equal=less_equal
    assert_near=isclose assert_non_negative=greater_equal assert_none_equal=not_equal
    assert_positive=greater  .compat.signatures: enable_check_numerics=nothing
    set_log_device_placement=nothing  .compat.tensor_functions: Assert=check_true
    check_numerics
[signal] numpy.fft/unary: fft fft2d=fft2 ifft ifft2d=ifft2 irfft rfft
[strings] numpy.strings/unary: length=str_len lower strip upper
    .compat.array_functions/unary: to_number
[UnconnectedGradients] text: NONE=none ZERO=zero
[version] .compat.tf: VERSION=__version__
[distribute] .compat.strategies: StrategyExtended get_replica_context get_strategy
    ndistribute: CrossDeviceOps
    DistributedDataset DistributedIterator DistributedValues HierarchicalCopyAllReduce InputContext
    InputOptions InputReplicationMode NcclAllReduce ReduceOp ReductionToOneDevice ReplicaContext
    RunOptions Strategy experimental_set_strategy=set_strategy has_strategy in_cross_replica_context
    ndistribute/server: Server  ndistribute/strategy: CentralStorageStrategy MirroredStrategy
    MultiWorkerMirroredStrategy OneDeviceStrategy ParameterServerStrategy TPUStrategy
[distribute.cluster_resolver] .cluster: ClusterResolver  ndistribute: KubernetesClusterResolver
    SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver UnionResolver
    ndistribute/resolver: TPUClusterResolver
[distribute.coordinator] ndistribute: ClusterCoordinator PerWorkerValue RemoteValue
    PerWorkerValues=PerWorkerValue
[distribute.experimental] .compat.tf.distribute/by_communication: MultiWorkerMirroredStrategy
    .compat.tf.distribute: CentralStorageStrategy MirroredStrategy OneDeviceStrategy
    ParameterServerStrategy TPUStrategy coordinator
    ndistribute: CollectiveCommunication=CommunicationImplementation CommunicationImplementation
    CommunicationOptions  .models: TerminationConfig
    .compat.configuration: PreemptionCheckpointHandler=preemption_handler PreemptionWatcher
    ndistribute: CollectiveHints=CommunicationOptions ValueContext=ReplicaContext
[distribute.experimental.partitioners] .variables.partitioners: *
[dtypes] .compat.graphs: as_dtype=dtype_of  .compat.tensor_functions: cast  numpy/dtype: bool=bool_
    complex128 complex64 double=float64 float16 float32 float64 half=float16 int16 int32 int64 int8
    string=str_ uint16 uint32 uint64 uint8
[errors] builtins: OutOfRangeError=StopIteration  ndistribute: UnavailableError=WorkerLostError
    .errors: AbortedError CancelledError DeadlineExceededError FailedPreconditionError
    InvalidArgumentError NotFoundError OpError=OperationError
[estimator] .estimator: BinaryClassHead=binary_class_head DNNClassifier DNNEstimator
    DNNLinearCombinedClassifier DNNLinearCombinedEstimator DNNLinearCombinedRegressor DNNRegressor
    Estimator EstimatorSpec EvalSpec LinearClassifier LinearEstimator LinearRegressor ModeKeys
    MultiClassHead=multi_class_head RegressionHead=regression_head RunConfig TrainSpec
    WarmStartSettings add_metrics train_and_evaluate  .graph: CheckpointSaverHook
    CheckpointSaverListener FinalOpsHook GlobalStepWaiterHook LoggingTensorHook
    NanLossDuringTrainingError NanTensorHook SessionRunArgs SessionRunContext SessionRunHook
    SessionRunValues StepCounterHook StopAtStepHook SummarySaverHook
[estimator.experimental] .estimator.early_stopping: make_early_stopping_hook
    stop_if_no_decrease_hook stop_if_no_increase_hook
[feature_column] .estimator.feature_column: bucketized_column categorical_column_with_hash_bucket
    categorical_column_with_identity categorical_column_with_vocabulary_list embedding_column
    indicator_column numeric_column
[io]
[io.gfile] os: listdir remove  os.path: exists isdir join  glob: glob  builtins: GFile=open
    .compat.adapters: makedirs rmtree
[keras] .compat.adapters: Input Model Sequential
[keras.activations] .models.activations: * swish=silu
[keras.backend] .compat.signatures: clear_session=nothing  .compat.adapters: epsilon floatx
    image_data_format  .compat.tensor_functions: cast clip=clip_by_value dot=matmul expand_dims
    gather get_value one_hot ones set_value squeeze zeros  .compat.tf.math: abs argmax cumsum equal
    exp log max=reduce_max maximum mean=reduce_mean min=reduce_min minimum pow round sigmoid sign
    softplus sqrt square std=reduce_std sum=reduce_sum tanh  .compat.tf.nn: relu softmax
    .compat.tf.random: random_normal=normal random_uniform=uniform
[keras.callbacks] .models.callbacks/callback: *  .models.callbacks: Callback History LambdaCallback
[keras.callbacks.experimental] .compat.tf.keras.callbacks: BackupAndRestore
[keras.estimator] .estimator: model_to_estimator
[keras.initializers] .models.initializers: * constant=Constant glorot_normal=GlorotNormal
    glorot_uniform=GlorotUniform he_normal=HeNormal he_uniform=HeUniform ones=Ones zeros=Zeros
[keras.layers] .models.layers: * AveragePooling1D=AveragePool1D
    AveragePooling2D=AveragePool2D Convolution2D=Conv2D GlobalAveragePooling1D=GlobalAveragePool1D
    GlobalAveragePooling2D=GlobalAveragePool2D GlobalMaxPooling1D=GlobalMaxPool1D
    GlobalMaxPooling2D=GlobalMaxPool2D MaxPooling1D=MaxPool1D MaxPooling2D=MaxPool2D
    text/activation: ELU=elu ReLU=relu Softmax=softmax  .compat.adapters: Input InputLayer=Input
    SyncBatchNormalization
[keras.losses] .models.losses/loss: * MAE=mean_absolute_error MSE=mean_squared_error
[keras.losses.Reduction] text: AUTO=sum_over_batch_size NONE=none SUM=sum
    SUM_OVER_BATCH_SIZE=sum_over_batch_size
[keras.metrics] .models.metrics/metric: *  .models.metrics: Metric get
[keras.mixed_precision] .optimizers: LossScaleOptimizer=LossScale
    .models.layers: set_global_policy=set_dtype_policy
[keras.models] .compat.adapters: Model Sequential load_model save_model  .models: clone_model
[keras.optimizers] .optimizers/optimizer: *  .optimizers: Optimizer
    .compat.adapters: get=get_optimizer
[keras.optimizers.legacy] .compat.tf.keras.optimizers: *
[keras.optimizers.schedules] .optimizers.schedules: *
[keras.preprocessing]
[keras.preprocessing.sequence] .compat.adapters: pad_sequences
[keras.regularizers] .models.regularizers: * l1=L1 l2=L2
[keras.utils] ndistribute: set_random_seed=set_seed  .models: SidecarEvaluator
    .compat.adapters: pad_sequences to_categorical
[keras.utils.experimental] .models.batches: DatasetCreator
[initializers] .compat.tf.keras.initializers: *
[losses] .compat.tf.keras.losses: *
[metrics] .compat.tf.keras.metrics: *
[optimizers] .compat.tf.keras.optimizers: *
[linalg] .compat.array_functions/unary: band_part diag diag_part l2_normalize logdet lstsq
    matrix_transpose matvec normalize svd tensor_diag=diag tensor_diag_part=diag_part
    numpy/operation: einsum  numpy/binary: tensordot  numpy/unary: trace
    numpy.linalg/unary: cholesky det eigh eigvalsh inv pinv qr slogdet  numpy.linalg/binary: cross
    solve  .compat.tensor_functions: eye global_norm matmul norm
[math] .compat.array_functions/unary: bincount confusion_matrix count_nonzero cumprod divide_no_nan
    erf l2_normalize log_sigmoid reduce_euclidean_norm=euclidean_norm rsqrt segment_sum softsign
    squared_difference top_k unsorted_segment_sum  .compat.array_functions/operation: polyval
    .models.nn/last_axis: log_softmax softmax  numpy/unary: abs acos=arccos acosh=arccosh angle
    asin=arcsin asinh=arcsinh atan=arctan atanh=arctanh ceil conj cos cosh exp expm1 floor imag
    invert_permutation=argsort is_finite=isfinite is_inf=isinf is_nan=isnan log log1p logical_not
    negative real reciprocal rint round sign sin sinh sqrt square tan tanh  numpy/binary: add
    atan2=arctan2 divide equal floordiv=floor_divide floormod=remainder greater greater_equal less
    less_equal logical_and logical_or logical_xor maximum minimum mod=remainder multiply not_equal
    pow=power scalar_mul=multiply subtract truediv=divide  numpy/reduction: reduce_all=all
    reduce_any=any reduce_max=max reduce_mean=mean reduce_min=min reduce_prod=prod reduce_std=std
    reduce_sum=sum reduce_variance=var  numpy/index: argmax argmin
    .models.nn/reduction: reduce_logsumexp=logsumexp  .models.activations/unary: softplus
    .models.nn/unary: sigmoid  .compat.tensor_functions: accumulate_n=add_n add_n cumsum in_top_k
    .compat.graphs/operation: zero_fraction
[nest] .tree: flatten map_structure=map_leaves pack_sequence_as=unflatten
[nn] .compat.array_functions/unary: batch_normalization l2_normalize log_sigmoid moments relu6 selu
    softsign top_k  .models.activations/unary: elu softplus  .models.nn/unary: gelu relu sigmoid
    silu swish=silu  numpy/unary: tanh  .compat.tensor_functions: bias_add dropout embedding_lookup
    in_top_k l2_loss leaky_relu sigmoid_cross_entropy_with_logits=sigmoid_loss
    softmax_cross_entropy_with_logits=softmax_loss
    sparse_softmax_cross_entropy_with_logits=softmax_loss  .compat.graphs/operation: avg_pool
    avg_pool2d=avg_pool conv2d max_pool max_pool2d=max_pool zero_fraction
    .models.losses: compute_average_loss scale_regularization_loss
    .models.nn/last_axis: log_softmax softmax
[random] .compat.random_numbers: Generator categorical gamma get_global_generator poisson shuffle
    stateless_normal stateless_uniform  ndistribute: set_seed  .compat.random_numbers/either: normal
    truncated_normal uniform
[saved_model] .compat.adapters: load=load_model save=save_model
[summary] .compat.summaries: SummaryWriter=SummaryFile create_file_writer=SummaryFile flush
    histogram image record_if scalar should_record_summaries text
[summary.experimental] .compat.summaries: get_step set_step
[train] ndistribute: CheckpointManager ClusterSpec  .compat.adapters: Checkpoint
    .models: list_variables load_checkpoint load_variable
    .compat.tensor_functions/either: ExponentialMovingAverage latest_checkpoint
    .graph: Coordinator get_checkpoint_state
[test] .compat.adapters: is_gpu_available
[tpu]
[tpu.experimental] ndistribute: initialize_tpu_system
[] .compat.tf.dtypes: *  .compat.tf.math: *  .compat.tf.linalg: einsum eye matmul norm tensordot
    ndistribute: IndexedSlices VariableAggregation VariableSynchronization stop_gradient
    .compat.tensors: GradientTape=WatchingTape Module Tensor convert_to_tensor custom_gradient
    .compat.tensor_functions/variable: Variable  .compat.tensor_functions: Assert=check_true
    TensorArray TensorSpec clip_by_global_norm clip_by_value complex=complex_number expand_dims fill
    function gather identity is_tensor one_hot ones range=numbers slice=slice_ split squeeze tile
    transpose unstack where zeros  .compat.tensor_functions/either: cond constant
    control_dependencies group no_op numpy_function py_function  .compat.array_functions/unary:
    argsort boolean_mask broadcast_to clip_by_norm ensure_shape gather_nd linspace pad repeat
    reverse roll searchsorted sequence_mask sort tensor_scatter_nd_add tensor_scatter_nd_max
    tensor_scatter_nd_min tensor_scatter_nd_sub tensor_scatter_nd_update unique unique_with_counts
    .compat.array_functions/operation: case foldl map_fn meshgrid scan scatter_nd switch_case
    vectorized_map=map_fn  numpy/unary: ones_like reshape unravel_index zeros_like  numpy/joining:
    concat=concatenate stack  numpy/counted: rank=ndim shape size  numpy: newaxis  .graph.shapes:
    TensorShape=Shape  builtins: print  .compat.graphs: get_logger  .compat.programs: init_scope
    .compat.graphs/program: device name_scope while_loop  .compat.programs/program:
    executing_eagerly  .models.initializers/initializer: constant_initializer=Constant
    ones_initializer=Ones random_normal_initializer=RandomNormal
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
[flags] .compat.graphs: DEFINE_bool=DEFINE_boolean DEFINE_boolean DEFINE_enum DEFINE_float
    DEFINE_integer DEFINE_string FLAGS
[GraphKeys] text: GLOBAL_STEP=global_step GLOBAL_VARIABLES=variables LOCAL_VARIABLES=local_variables
    LOSSES=losses REGULARIZATION_LOSSES=regularization_losses SUMMARIES=summaries
    TRAINABLE_VARIABLES=trainable_variables UPDATE_OPS=update_ops VARIABLES=variables
[gfile] .compat.tf.io.gfile: *  builtins: FastGFile=open Open=open  glob: Glob=glob
    os: ListDirectory=listdir Remove=remove  os.path: Exists=exists IsDirectory=isdir
    .compat.adapters: DeleteRecursively=rmtree MakeDirs=makedirs
[layers] .compat.layers/graph: AveragePooling2D BatchNormalization Conv2D Dense Dropout Flatten
    MaxPooling2D average_pooling2d batch_normalization conv2d dense dropout flatten max_pooling2d
[logging] logging: DEBUG ERROR FATAL INFO WARN=WARNING  .compat.graphs: debug error info
    set_verbosity warn=warning warning
[losses] .compat.graphs/losses: get_regularization_loss get_total_loss mean_squared_error
    sigmoid_cross_entropy softmax_cross_entropy sparse_softmax_cross_entropy
[metrics] .graph.streaming_metrics/graph: accuracy mean mean_absolute_error mean_squared_error
    precision recall root_mean_squared_error
[math] .compat.graphs/operation: in_top_k
[nn] .compat.graphs/operation: in_top_k xw_plus_b
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
    MonitoredSession SingularMonitoredSession WorkerSessionCreator
    .graph.variables: get_global_step=find_global_step
    .compat.tf.compat.v1.summary: SummaryWriter  .graph: CheckpointSaverHook CheckpointSaverListener
    FinalOpsHook GlobalStepWaiterHook LoggingTensorHook NanLossDuringTrainingError NanTensorHook
    Optimizer Saver Scaffold SessionRunArgs SessionRunContext SessionRunHook SessionRunValues
    StepCounterHook StopAtStepHook SummarySaverHook SyncReplicasOptimizer exponential_decay
    piecewise_constant polynomial_decay replica_device_setter
    init_from_checkpoint
[] .compat.tensor_functions/either: get_variable global_variables_initializer
    glorot_uniform_initializer initialize_all_variables=global_variables_initializer
    initialize_local_variables=local_variables_initializer local_variables_initializer py_func
    random_normal_initializer random_uniform_initializer truncated_normal_initializer
    .compat.random_numbers/either: random_normal=normal random_uniform=uniform truncated_normal
    .compat.programs/program: disable_eager_execution=use_graphs disable_v2_behavior=use_graphs
    enable_eager_execution=use_arrays enable_v2_behavior=use_arrays
    .compat.graphs: InteractiveSession RunOptions Session=BytesSession add_to_collection assign
    assign_add assign_sub get_collection set_random_seed  .compat.graphs/operation: to_float
    to_int32 to_int64  types: RunMetadata=SimpleNamespace  .graph.session: GPUOptions
    .compat.graphs/graph: placeholder  .graph: AUTO_REUSE ConfigProto all_variables=global_variables
    get_default_graph get_variable_scope global_variables gradients local_variables
    report_uninitialized_variables reset_default_graph trainable_variables variable_scope
    variables_initializer  .graph.summary: histogram_summary=histogram image_summary=image
    merge_all_summaries=merge_all merge_summary=merge scalar_summary=scalar
    numpy/binary: mul=multiply sub=subtract  numpy/unary: diag neg=negative
    numpy/joining: pack=stack  .compat.tensor_functions: div global_norm unpack=unstack
"""
INSTEAD = {
    "RaggedTensor": "lists of arrays, or padded arrays",
    "SparseTensor": "tf.IndexedSlices, or whole arrays",
    "audio": "SciPy in Dataset.map",
    "contrib.rnn": "a model, and tf.keras.estimator.model_to_estimator",
    "data.FixedLengthRecordDataset": "Dataset.from_files with a reader",
    "data.TFRecordDataset": "arrays, or Dataset.from_files with a reader",
    "estimator.BestExporter": "tf.keras.estimator.model_to_estimator, and nd.Model.export",
    "estimator.BoostedTreesClassifier": "sklearn.ensemble.HistGradientBoostingClassifier",
    "estimator.BoostedTreesRegressor": "sklearn.ensemble.HistGradientBoostingRegressor",
    "estimator.BoostedTreesEstimator": "sklearn.ensemble.HistGradientBoostingClassifier",
    "estimator.FinalExporter": "tf.keras.estimator.model_to_estimator, and nd.Model.export",
    "estimator.LatestExporter": "tf.keras.estimator.model_to_estimator, and nd.Model.export",
    "estimator.experimental.stop_if_higher_hook": "make_early_stopping_hook",
    "estimator.experimental.stop_if_lower_hook": "make_early_stopping_hook",
    "estimator.tpu": "tf.keras.estimator.model_to_estimator of a model under TPUStrategy",
    "experimental": "NumPy for tf.experimental.numpy; the rest does not exist",
    "feature_column.crossed_column": "one column of both words, joined in Dataset.map",
    "gradients": "tf.GradientTape, or tf.compat.v1.gradients in a graph",
    "hessians": "tape.jacobian of a gradient that another tape has recorded",
    "image": "NumPy or Pillow in Dataset.map",
    "io.decode_image": "Pillow in Dataset.map",
    "io.decode_jpeg": "Pillow in Dataset.map",
    "io.parse_single_example": "arrays, or Dataset.from_files with a reader",
    "io.read_file": "tf.io.gfile.GFile",
    "keras.applications": "layers, and load_weights: nothing is downloaded",
    "keras.datasets": "arrays that you load: nothing is downloaded",
    "keras.experimental": "tf.keras.Sequential, or tf.estimator.DNNLinearCombinedEstimator",
    "keras.layers.DenseFeatures": "tf.compat.v1.feature_column.input_layer in a graph",
    "keras.preprocessing.image": "arrays, or NumPy and Pillow in Dataset.map",
    "keras.preprocessing.text": "arrays of numbers, or tf.keras.layers.StringLookup",
    "keras.layers.RNN": "tf.keras.layers.SimpleRNN, LSTM or GRU, or a loop over the steps in call",
    "keras.layers.RandomRotation": "RandomFlip and RandomCrop, or Pillow in Dataset.map",
    "keras.layers.deserialize": "from_config of the class of the layer",
    "keras.layers.serialize": "get_config of the layer",
    "keras.utils.Sequence": "a generator, or Dataset.from_generator",
    "keras.utils.custom_object_scope": "custom_objects of load_model or from_config",
    "keras.utils.get_file": "files that you fetch: nothing is downloaded",
    "keras.utils.plot_model": "model.summary()",
    "lite": "nd.models.load where the model serves",
    "lookup": "a dict in Dataset.map",
    "nn.dynamic_rnn": "a model, and tf.keras.estimator.model_to_estimator",
    "nn.rnn_cell": "a model, and tf.keras.estimator.model_to_estimator",
    "profiler": "the command ndistribute trace",
    "queue": "a dataset",
    "ragged": "lists of arrays, or padded arrays",
    "signal.stft": "SciPy",
    "sparse": "tf.IndexedSlices, or whole arrays",
    "strings.join": "str.join, or + of tensors of text",
    "strings.split": "str.split of x.numpy().decode()",
    "train.Example": "arrays in .npz files",
    "train.QueueRunner": "a dataset",
    "train.SecondOrStepTimer": "time.monotonic(), or the step, in after_run of the hook",
    "train.SessionManager": "tf.compat.v1.train.MonitoredTrainingSession, or Supervisor",
    "train.batch": "Dataset.batch",
    "train.string_input_producer": "Dataset.from_files",
}
"""What to use instead of names that do not exist, by their paths."""
