"""The guide of custom training loops, with synthetic digits in place of a download."""

import os

import numpy as np

import ndistribute.compat.tf as tf

rng = np.random.default_rng(0)
labels = rng.integers(0, 10, 320)
images = rng.normal(0, 0.15, (320, 8, 8)) + np.eye(64)[labels * 6].reshape(-1, 8, 8)
train_images, train_labels = images[:256], labels[:256]
test_images, test_labels = images[256:], labels[256:]

# Add a dimension to the array, since the first layer is a convolutional layer.
train_images = np.float32(train_images[..., None])
test_images = np.float32(test_images[..., None])

# If the list of devices is not specified, they are detected.
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

BUFFER_SIZE = len(train_images)
BATCH_SIZE_PER_REPLICA = 16
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 4

train_dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
train_dataset = train_dataset.shuffle(BUFFER_SIZE).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
test_dataset = test_dataset.batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-5)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )
    return model


# Create a checkpoint directory to store the checkpoints.
checkpoint_dir = "./training_checkpoints"
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")

with strategy.scope():
    # Set reduction to `NONE` so you can do the reduction yourself.
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss


with strategy.scope():
    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

# A model, an optimizer, and a checkpoint must be created under `strategy.scope`.
with strategy.scope():
    model = create_model()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs

    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)

    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs

    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)

    test_loss.update_state(t_loss)
    test_accuracy.update_state(labels, predictions)


# `run` replicates the provided computation and runs it with the distributed input.
@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


for epoch in range(EPOCHS):
    # TRAIN LOOP
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    train_loss = total_loss / num_batches

    # TEST LOOP
    for x in test_dist_dataset:
        distributed_test_step(x)

    if epoch % 2 == 1:
        checkpoint.save(checkpoint_prefix)

    template = "Epoch {}, Loss: {}, Accuracy: {}, Test Loss: {}, Test Accuracy: {}"
    print(
        template.format(
            epoch + 1,
            train_loss,
            train_accuracy.result() * 100,
            test_loss.result(),
            test_accuracy.result() * 100,
        )
    )
    last_accuracy = test_accuracy.result().numpy()
    test_loss.reset_states()
    train_accuracy.reset_state()
    test_accuracy.reset_states()
assert last_accuracy > 0.5

# Restore the latest checkpoint and test, without a strategy.
eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model = create_model()
new_optimizer = tf.keras.optimizers.Adam()
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
test_dataset = test_dataset.batch(GLOBAL_BATCH_SIZE)


@tf.function
def eval_step(images, labels):
    predictions = new_model(images, training=False)
    eval_accuracy(labels, predictions)


checkpoint = tf.train.Checkpoint(optimizer=new_optimizer, model=new_model)
checkpoint.restore(tf.train.latest_checkpoint(checkpoint_dir)).expect_partial()

for images, labels in test_dataset:
    eval_step(images, labels)
print("Accuracy after restoring without strategy: {}".format(eval_accuracy.result() * 100))
assert eval_accuracy.result() == last_accuracy


# Alternate ways of iterating: an iterator, and steps of a whole epoch inside a tf.function.
@tf.function
def distributed_train_epoch(dataset):
    total_loss = 0.0
    num_batches = 0
    for x in iter(dataset):
        per_replica_losses = strategy.run(train_step, args=(x,))
        total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        num_batches += 1
    return total_loss / tf.cast(num_batches, dtype=tf.float32)


train_loss = distributed_train_epoch(train_dist_dataset)
print("Loss: {:.5f}, as an array:".format(train_loss), tf.reduce_mean(train_loss).numpy())

# Optionals, values of each replica, and a loss over a given global batch size.
iterator = iter(test_dist_dataset)
optional = iterator.get_next_as_optional()
while optional.has_value():
    batch = optional.get_value()
    print(strategy.experimental_local_results(batch)[0][0].shape)
    optional = iterator.get_next_as_optional()


def value_fn(ctx):
    return tf.constant(ctx.replica_id_in_sync_group, tf.float32)


@tf.function
def weighted(value, per_example):
    replica = tf.distribute.get_replica_context()
    assert replica.num_replicas_in_sync == 2
    return value * tf.nn.compute_average_loss(
        per_example, sample_weight=[1.0, 3.0], global_batch_size=4
    )


values = strategy.experimental_distribute_values_from_function(value_fn)
results = strategy.run(weighted, args=(values, tf.constant([2.0, 2.0])))
assert strategy.reduce("SUM", results, axis=None).numpy() == 2.0
