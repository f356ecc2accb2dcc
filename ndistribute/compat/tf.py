"""Names of TensorFlow 2: ``import ndistribute.compat.tf as tf`` runs many of its scripts unchanged.

Arrays are NumPy's and CuPy's, and everything runs at once: `function` returns its function, unless
it is told to compile it. In the table, a namespace is in brackets; `Names` tells how the words
after it are read.
"""

import sys as _sys

from ndistribute.compat.namespaces import Names as _Names
from ndistribute.version import __version__ as _version

_TABLE = """
[app] .compat.tf: flags  .compat.graphs/graph: run
[config] .compat.configuration: LogicalDevice LogicalDeviceConfiguration
        get_logical_device_configuration list_logical_devices set_logical_device_configuration
    .compat.adapters: list_physical_devices=list_devices
        experimental_connect_to_cluster=nothing run_functions_eagerly=nothing
        set_soft_device_placement=nothing
[config.experimental] .compat.tf.config: list_logical_devices list_physical_devices
        VirtualDeviceConfiguration=LogicalDeviceConfiguration
        get_virtual_device_configuration=get_logical_device_configuration
        set_virtual_device_configuration=set_logical_device_configuration
    .compat.adapters: enable_op_determinism=nothing set_memory_growth=nothing
[contrib]
[contrib.framework] .graph/graph: get_or_create_global_step
[contrib.layers] .compat.graphs/graph: l2_regularizer xavier_initializer=glorot_uniform_initializer
    .compat.layers/graph: flatten
[contrib.training] .graph/graph: GreedyLoadBalancingStrategy byte_size_load_fn
[data] .compat.adapters: Dataset=TensorDataset Options TextLineDataset
    .data: AUTOTUNE INFINITE_CARDINALITY UNKNOWN_CARDINALITY
    .graph/graph: make_initializable_iterator=DatasetIterator make_one_shot_iterator=DatasetIterator
[data.experimental] .data: AUTOTUNE INFINITE_CARDINALITY UNKNOWN_CARDINALITY
    .compat.adapters: make_csv_dataset  ndistribute: AutoShardPolicy
[debugging] .compat.adapters: set_log_device_placement=nothing
[distribute] ndistribute: CrossDeviceOps DistributedDataset DistributedIterator
        DistributedValues HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode
        NcclAllReduce ReduceOp ReductionToOneDevice ReplicaContext RunOptions Strategy
        get_replica_context get_strategy has_strategy
        in_cross_replica_context
    ndistribute/server: Server
    ndistribute/strategy: CentralStorageStrategy MirroredStrategy MultiWorkerMirroredStrategy
        OneDeviceStrategy ParameterServerStrategy TPUStrategy
[distribute.cluster_resolver] .cluster: ClusterResolver
    ndistribute: KubernetesClusterResolver SimpleClusterResolver SlurmClusterResolver UnionResolver
    ndistribute/resolver: TFConfigClusterResolver TPUClusterResolver
[distribute.coordinator] ndistribute: ClusterCoordinator PerWorkerValue RemoteValue
[distribute.experimental] .compat.tf.distribute: CentralStorageStrategy MirroredStrategy
        MultiWorkerMirroredStrategy OneDeviceStrategy ParameterServerStrategy TPUStrategy
        coordinator
    ndistribute: CollectiveCommunication=CommunicationImplementation CommunicationImplementation
        CommunicationOptions
    .compat.configuration: PreemptionCheckpointHandler=preemption_handler PreemptionWatcher
    .models: TerminationConfig
[distribute.experimental.partitioners] .variables.partitioners: *
[dtypes] .compat.adapters: cast
    numpy/dtype: bool=bool_ complex64 complex128 double=float64 float16 float32 float64 half=float16
        int8 int16 int32 int64 uint8 uint16 uint32 uint64
[errors] builtins: OutOfRangeError=StopIteration  ndistribute: UnavailableError=WorkerLostError
    .errors: AbortedError CancelledError DeadlineExceededError FailedPreconditionError
        InvalidArgumentError NotFoundError OpError=OperationError
[estimator] .estimator/graph: DNNClassifier DNNRegressor Estimator EstimatorSpec EvalSpec
        LinearClassifier LinearRegressor ModeKeys RunConfig TrainSpec train_and_evaluate
[estimator.inputs] .compat.graphs/graph: numpy_input_fn
[feature_column] .estimator.feature_column/graph: bucketized_column
        categorical_column_with_hash_bucket categorical_column_with_identity
        categorical_column_with_vocabulary_list embedding_column indicator_column input_layer
        linear_model numeric_column
[flags] .compat.graphs: DEFINE_bool=DEFINE_boolean DEFINE_boolean DEFINE_enum DEFINE_float
        DEFINE_integer DEFINE_string FLAGS
[GraphKeys]
    text: GLOBAL_STEP=global_step GLOBAL_VARIABLES=variables LOCAL_VARIABLES=local_variables
        LOSSES=losses REGULARIZATION_LOSSES=regularization_losses SUMMARIES=summaries
        TRAINABLE_VARIABLES=trainable_variables UPDATE_OPS=update_ops VARIABLES=variables
[io]
[io.gfile] os: listdir remove  os.path: exists isdir join  glob: glob  builtins: GFile=open
    .compat.adapters: makedirs rmtree
[gfile] .compat.tf.io.gfile: *
    builtins: FastGFile=open Open=open  glob: Glob=glob
    os: ListDirectory=listdir Remove=remove  os.path: Exists=exists IsDirectory=isdir
    .compat.adapters: DeleteRecursively=rmtree MakeDirs=makedirs
[keras] .compat.adapters: Input Model Sequential
[keras.activations] .models.activations: * swish=silu
[keras.callbacks] .models.callbacks/callback: *
    .models.callbacks: Callback History LambdaCallback
[keras.callbacks.experimental] .compat.tf.keras.callbacks: BackupAndRestore
[keras.estimator] .estimator/graph: model_to_estimator
[keras.initializers] .models.initializers: * constant=Constant glorot_normal=GlorotNormal
        glorot_uniform=GlorotUniform he_normal=HeNormal he_uniform=HeUniform ones=Ones zeros=Zeros
[keras.layers] .models.layers: * AveragePooling2D=AveragePool2D Convolution2D=Conv2D
        GlobalAveragePooling2D=GlobalAveragePool2D Lambda=Activation MaxPooling2D=MaxPool2D
    text/activation: ELU=elu ReLU=relu Softmax=softmax
    .compat.adapters: Input InputLayer=Input SyncBatchNormalization
[keras.losses] .models.losses/loss: * MAE=mean_absolute_error MSE=mean_squared_error
[keras.losses.Reduction]
    text: AUTO=sum_over_batch_size NONE=none SUM=sum SUM_OVER_BATCH_SIZE=sum_over_batch_size
[keras.metrics] .models.metrics/metric: *  .models.metrics: Metric get
[keras.mixed_precision] .optimizers: LossScaleOptimizer=LossScale
    .models.layers: set_global_policy=set_dtype_policy
[keras.models] .compat.adapters: Model Sequential load_model save_model
[keras.optimizers] .optimizers/optimizer: *  .optimizers: Optimizer
    .compat.adapters: get=get_optimizer
[keras.optimizers.legacy] .compat.tf.keras.optimizers: *
[keras.optimizers.schedules] .optimizers.schedules: *
[keras.regularizers] .models.regularizers: * l1=L1 l2=L2
[keras.utils] ndistribute: set_random_seed=set_seed  .models: SidecarEvaluator
    .compat.adapters: to_categorical
[layers] .compat.layers/graph: average_pooling2d batch_normalization conv2d dense dropout flatten
        max_pooling2d
[linalg] numpy: einsum  numpy/binary: tensordot  numpy.linalg/unary: det inv
    numpy.linalg/binary: solve  .compat.adapters: eye matmul norm
[logging] logging: DEBUG ERROR FATAL INFO WARN=WARNING
    .compat.graphs: debug error info set_verbosity warn=warning warning
[losses]
    .compat.graphs/graph: get_regularization_loss get_total_loss mean_squared_error
        sigmoid_cross_entropy softmax_cross_entropy sparse_softmax_cross_entropy
[math] numpy/unary: abs ceil cos cosh exp expm1 floor is_finite=isfinite is_nan=isnan log log1p
        logical_not negative round sign sin sinh sqrt square tan tanh
    numpy/binary: add divide equal floordiv=floor_divide floormod=remainder greater greater_equal
        less less_equal logical_and logical_or maximum minimum mod=remainder multiply not_equal
        pow=power subtract
    numpy/reduction: reduce_all=all reduce_any=any reduce_max=max reduce_mean=mean reduce_min=min
        reduce_prod=prod reduce_std=std reduce_sum=sum reduce_variance=var
    numpy/index: argmax argmin  .models.nn/reduction: reduce_logsumexp=logsumexp
    .models.activations/unary: softplus  .models.nn/unary: sigmoid  .compat.adapters: add_n cumsum
[metrics] .graph.streaming_metrics/graph: accuracy mean mean_absolute_error mean_squared_error
        precision recall root_mean_squared_error
[nest] .tree: flatten map_structure=map_leaves
[nn] .models.activations/unary: elu softplus
    .models.nn/unary: gelu relu sigmoid silu swish=silu  numpy/unary: tanh
    .compat.adapters: bias_add
    .compat.graphs/operation: avg_pool conv2d dropout in_top_k max_pool xw_plus_b zero_fraction
    .models.losses: compute_average_loss scale_regularization_loss
    .models.nn/last_axis: log_softmax softmax
    .compat.adapters: embedding_lookup l2_loss leaky_relu
        sigmoid_cross_entropy_with_logits=sigmoid_loss
        softmax_cross_entropy_with_logits=softmax_loss_v1
        softmax_cross_entropy_with_logits_v2=softmax_loss
        sparse_softmax_cross_entropy_with_logits=softmax_loss
[random] ndistribute: set_seed  text/random: normal uniform
[saved_model] .compat.adapters: load=load_model save=save_model
[summary] .graph.summary/graph: histogram image merge merge_all scalar
    .graph.summary/writer: FileWriter
[train] ndistribute: CheckpointManager ClusterSpec  ndistribute/server: Server
    .compat.adapters: Checkpoint start_queue_runners=nothing
    .models: list_variables load_checkpoint load_variable
    .compat.graphs: latest_checkpoint
    .compat.graphs/graph: MonitoredTrainingSession=MonitoredBytesSession global_step
    .compat.graph_supervisor/graph: Supervisor
    .graph.variables/graph: get_global_step=find_global_step
    .compat.tf.summary: SummaryWriter=FileWriter
    .graph/graph: AdagradOptimizer AdamOptimizer CheckpointSaverHook Coordinator
        ExponentialMovingAverage FinalOpsHook GlobalStepWaiterHook GradientDescentOptimizer
        LoggingTensorHook MomentumOptimizer NanLossDuringTrainingError
        NanTensorHook Optimizer RMSPropOptimizer Saver Scaffold SessionRunArgs SessionRunContext
        SessionRunHook SessionRunValues StepCounterHook StopAtStepHook SummarySaverHook
        SyncReplicasOptimizer exponential_decay create_global_step=get_or_create_global_step
        get_checkpoint_state get_or_create_global_step init_from_checkpoint piecewise_constant
        polynomial_decay replica_device_setter
[tpu]
[tpu.experimental] ndistribute: initialize_tpu_system
[] .compat.tf.dtypes: *  .compat.tf.math: *  .compat.tf.linalg: einsum eye matmul norm
        tensordot
    ndistribute: GradientTape IndexedSlices VariableAggregation VariableSynchronization
        custom_gradient stop_gradient
    .compat.adapters: Tensor TensorSpec Variable clip_by_value cond constant convert_to_tensor
        executing_eagerly expand_dims fill function gather identity one_hot range=numbers
        slice=slice_ split squeeze tile transpose where
    numpy/unary: ones_like reshape zeros_like
    numpy/joining: concat=concatenate stack  .compat.adapters: ones zeros
    numpy/counted: rank=ndim shape size  numpy: newaxis  builtins: TensorShape=tuple print
    contextlib: init_scope=nullcontext
    .compat.graphs: device disable_eager_execution=use_graphs
        disable_v2_behavior=use_graphs enable_eager_execution=use_arrays group name_scope
        while_loop
    .compat.graphs/graph: InteractiveSession Session=BytesSession add_to_collection assign
        assign_add assign_sub control_dependencies get_collection glorot_uniform_initializer no_op
        placeholder py_func py_function=py_func random_normal_initializer
        random_uniform_initializer set_random_seed truncated_normal_initializer
    .compat.graphs/operation: to_float to_int32 to_int64
    .models.initializers/initializer: constant_initializer=Constant ones_initializer=Ones
        zeros_initializer=Zeros
    .compat.graphs: RunOptions  types: RunMetadata=SimpleNamespace
    .graph.session/graph: GPUOptions
    .graph: AUTO_REUSE Graph Operation
    .graph/graph: ConfigProto all_variables=global_variables clip_by_global_norm global_norm
        get_default_graph get_variable get_variable_scope global_variables gradients
        global_variables_initializer
        initialize_all_variables=global_variables_initializer local_variables
        random_normal random_uniform
        report_uninitialized_variables reset_default_graph
        trainable_variables truncated_normal variable_scope variables_initializer
    .graph.summary/graph: histogram_summary=histogram image_summary=image
        merge_all_summaries=merge_all merge_summary=merge scalar_summary=scalar
    .compat.graphs/graph: initialize_local_variables=local_variables_initializer
        local_variables_initializer
    numpy/binary: mul=multiply sub=subtract truediv=divide  numpy/unary: diag neg=negative
    numpy/joining: pack=stack  .compat.adapters: div unpack=unstack unstack
[compat]
[compat.v1] .compat.tf/graph: *
"""

__version__ = _version
__all__: list[str] = []
_tf = _sys.modules[__name__]
_tf.__class__ = _Names
for _section in _TABLE.split("[")[1:]:
    _path, _words = _section.split("]")
    (_Names(_path) if _path else _tf)._fill(_words)
