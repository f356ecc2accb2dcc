"""The guides of several workers: the same program on each, which differ in TF_CONFIG alone."""

import json
import os

import numpy as np

import ndistribute.compat.tf as tf

tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])
per_worker_batch_size = 16
global_batch_size = per_worker_batch_size * num_workers

strategy = tf.distribute.MultiWorkerMirroredStrategy()
print("workers", num_workers, "replicas", strategy.num_replicas_in_sync)


def mnist_dataset(batch_size):
    rng = np.random.default_rng(0)
    y_train = rng.integers(0, 10, 256)
    x_train = rng.normal(0, 0.15, (256, 8, 8)) + np.eye(64)[y_train * 6].reshape(-1, 8, 8)
    x_train = x_train.astype(np.float32)
    y_train = y_train.astype(np.int64)
    return (
        tf.data.Dataset.from_tensor_slices((x_train, y_train))
        .shuffle(256, 1)
        .repeat()
        .batch(batch_size)
    )


def build_cnn_model():
    regularizer = tf.keras.regularizers.L2(1e-5)
    return tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(input_shape=(8, 8)),
            tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
multi_worker_dataset = mnist_dataset(global_batch_size).with_options(options)

with strategy.scope():
    # Model building and compiling need to be within `strategy.scope()`.
    multi_worker_model = build_cnn_model()
    multi_worker_model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )

callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir="backup")]
history = multi_worker_model.fit(
    multi_worker_dataset, epochs=3, steps_per_epoch=16, callbacks=callbacks
)
print("accuracy", round(history.history["accuracy"][-1], 6))

# Saving: every worker writes, the others than the chief to a place that is removed.
model_path = "keras-model"


def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id, cluster_spec):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id, cluster_spec):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


task_type, task_id = (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id)
cluster_spec = strategy.cluster_resolver.cluster_spec()
write_model_path = write_filepath(model_path, task_type, task_id, cluster_spec)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id, cluster_spec):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))
loaded_model = tf.keras.models.load_model(model_path)
print("loaded", [w.shape for w in loaded_model.trainable_weights][0])

# The dataset of a custom loop, and checkpoints that a restarted worker continues from.
multi_worker_dataset = strategy.distribute_datasets_from_function(
    lambda input_context: mnist_dataset(
        input_context.get_per_replica_batch_size(global_batch_size)
    ).shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
)
num_epochs = 3
epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.dtypes.int64), name="epoch")
checkpoint_dir = os.path.join("util", "ckpt")
checkpoint = tf.train.Checkpoint(model=multi_worker_model, epoch=epoch)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id, cluster_spec)
checkpoint_manager = tf.train.CheckpointManager(
    checkpoint, directory=write_checkpoint_dir, max_to_keep=1
)
latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
if latest_checkpoint:
    checkpoint.restore(latest_checkpoint)

while epoch.numpy() < num_epochs:
    images, _ = next(iter(multi_worker_dataset))
    means = strategy.run(
        lambda images: tf.reduce_mean(multi_worker_model(images, training=False)), args=(images,)
    )
    mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, means, axis=None)
    print("Epoch: %d, mean: %f." % (epoch.numpy(), mean))
    epoch.assign_add(1)
    checkpoint_manager.save()
    if not _is_chief(task_type, task_id, cluster_spec):
        tf.io.gfile.rmtree(write_checkpoint_dir)
print("ended", epoch.numpy())
