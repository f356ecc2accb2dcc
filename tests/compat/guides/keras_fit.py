"""The Keras guide of distributed training, with synthetic digits in place of a download."""

import os

import numpy as np

import ndistribute.compat.tf as tf

rng = np.random.default_rng(0)
labels = rng.integers(0, 10, 640)
images = rng.normal(0, 40, (640, 8, 8, 1)) + 255 * np.eye(64)[labels * 6].reshape(-1, 8, 8, 1)
datasets = {
    "train": tf.data.Dataset.from_tensor_slices((images[:512], labels[:512])),
    "test": tf.data.Dataset.from_tensor_slices((images[512:], labels[512:])),
}
mnist_train, mnist_test = datasets["train"], datasets["test"]

strategy = tf.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

BUFFER_SIZE = 10000
BATCH_SIZE_PER_REPLICA = 32
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    image = tf.cast(image, tf.float32)
    image /= 255

    return image, label


train_dataset = mnist_train.map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH_SIZE)
train_dataset = train_dataset.prefetch(buffer_size=tf.data.AUTOTUNE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(8, 8, 1)),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )

    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )

model.summary()

# Define the checkpoint directory to store the checkpoints.
checkpoint_dir = "./training_checkpoints"
# Define the name of the checkpoint files.
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}")


# Define a function for decaying the learning rate.
def decay(epoch):
    if epoch < 3:
        return 1e-2
    elif epoch >= 3 and epoch < 5:
        return 1e-3
    else:
        return 1e-4


# Define a callback for printing the learning rate at the end of each epoch.
class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(
            "\nLearning rate for epoch {} is {}".format(
                epoch + 1, self.model.optimizer.learning_rate.numpy()
            )
        )


callbacks = [
    tf.keras.callbacks.ModelCheckpoint(
        filepath=checkpoint_prefix, save_weights_only=True, verbose=1
    ),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]

EPOCHS = 4
history = model.fit(train_dataset, epochs=EPOCHS, callbacks=callbacks)
assert history.history["loss"][-1] < history.history["loss"][0]

eval_before, acc_before = model.evaluate(eval_dataset)
for weight in model.weights:
    weight.assign(tf.zeros_like(weight))
model.load_weights(tf.train.latest_checkpoint(checkpoint_dir))
eval_loss, eval_acc = model.evaluate(eval_dataset)
assert eval_loss == eval_before and eval_acc == acc_before > 0.5
print("Eval loss: {}, Eval accuracy: {}".format(eval_loss, eval_acc))

# Export the graph and the variables, and load the model with a strategy.
path = "saved_model/"
model.save(path, save_format="tf")

with strategy.scope():
    replicated_model = tf.keras.models.load_model(path)
    replicated_model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )
    eval_loss, eval_acc = replicated_model.evaluate(eval_dataset)
    np.testing.assert_allclose(eval_loss, eval_before, rtol=1e-5)
