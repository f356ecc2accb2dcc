"""Train on handwritten digits with a graph, parameter servers and workers, as TensorFlow 1 did.

Four processes run it, two servers and two workers. It needs no change but its import.
"""

import numpy as np
from sklearn.datasets import load_digits

from ndistribute.compat import tf1 as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "Addresses of the servers, host:port, separated by commas")
flags.DEFINE_string("worker_hosts", "", "Addresses of the workers")
flags.DEFINE_string("job_name", "worker", "ps or worker")
flags.DEFINE_integer("task_index", 0, "Number of the task in its job")
flags.DEFINE_integer("steps", 600, "Number of training steps of all workers together")
flags.DEFINE_integer("batch", 32, "Examples of a batch")
flags.DEFINE_string("logdir", None, "Folder of checkpoints and summaries")
flags.DEFINE_boolean("sync", False, "Whether workers make each step together")
flags.DEFINE_integer("aggregate", 0, "Gradients of a step with --sync; 0: those of all workers")
FLAGS = flags.FLAGS
WIDTH = 64


def load_data():
    """Return images and labels, for training and for the test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data / 16.0).astype(np.float32)[order], digits.target[order]
    return (images[360:], labels[360:]), (images[:360], labels[:360])


def model(workers):
    """Return the placeholders, the training step, the loss and the accuracy."""
    x = tf.placeholder(tf.float32, [None, 64], name="images")
    y = tf.placeholder(tf.int64, [None], name="labels")
    w1 = tf.Variable(tf.truncated_normal([64, WIDTH], stddev=0.125, seed=1), name="w1")
    b1 = tf.Variable(tf.zeros([WIDTH]), name="b1")
    w2 = tf.Variable(tf.truncated_normal([WIDTH, 10], stddev=0.125, seed=2), name="w2")
    b2 = tf.Variable(tf.zeros([10]), name="b2")
    hidden = tf.nn.relu(tf.matmul(x, w1) + b1)
    logits = tf.matmul(hidden, w2) + b2
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    loss = tf.reduce_mean(losses)
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
    tf.summary.scalar("loss", loss)
    optimizer = tf.train.AdagradOptimizer(0.05)
    if FLAGS.sync:
        optimizer = tf.train.SyncReplicasOptimizer(
            optimizer, replicas_to_aggregate=FLAGS.aggregate or workers, total_num_replicas=workers
        )
    step = tf.train.get_or_create_global_step()
    return x, y, optimizer.minimize(loss, global_step=step), loss, accuracy


def main(_):
    """Serve variables, or train."""
    ps_hosts, worker_hosts = FLAGS.ps_hosts.split(","), FLAGS.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": ps_hosts, "worker": worker_hosts})
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
        return
    (images, labels), (test_images, test_labels) = load_data()
    worker = f"/job:worker/task:{FLAGS.task_index}"
    with tf.device(tf.train.replica_device_setter(worker_device=worker, cluster=cluster)):
        x, y, train, loss, accuracy = model(len(worker_hosts))
    rng = np.random.default_rng(FLAGS.task_index)
    hooks = [tf.train.StopAtStepHook(last_step=FLAGS.steps)]
    with tf.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=FLAGS.task_index == 0,
        checkpoint_dir=FLAGS.logdir,
        save_checkpoint_steps=50,
        hooks=hooks,
    ) as session:
        while not session.should_stop():
            rows = rng.integers(len(images), size=FLAGS.batch)
            _, value = session.run([train, loss], {x: images[rows], y: labels[rows]})
        reached = session.run(accuracy, {x: test_images, y: test_labels})
    print(f"worker {FLAGS.task_index}: loss {value:.4f}, test accuracy {reached:.4f}")


if __name__ == "__main__":
    tf.app.run()
