"""Train a generator of digits against a discriminator, with the strategy of your choice.

    python examples/gan.py --strategy mirrored --replicas 2
    ndistribute run -n 2 examples/gan.py --strategy multi_worker
    ndistribute run --workers 2 --ps 1 examples/gan.py --strategy parameter_server

It shows a custom loop with two models, two tapes and two optimizers in one step, in which every
replica draws its own noise. With matplotlib, it also writes a picture of generated digits.

Source: Goodfellow et al., "Generative Adversarial Networks", 2014.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from train_digits import load_data, make_parser, make_strategy, report, serves

import ndistribute as nd
from ndistribute import layers

BATCH = 128
NOISE = 32
DRAWN = 64


class GAN:
    """A generator and a discriminator of images of 64 pixels, with an optimizer each."""

    def __init__(self, seed: int) -> None:
        nd.set_seed(seed)
        self.generator = nd.Sequential(
            [
                layers.Dense(128, activation="relu", input_shape=(NOISE,)),
                layers.BatchNormalization(momentum=0.9),
                layers.Dense(256, activation="relu"),
                layers.Dense(64, activation="sigmoid"),
            ]
        )
        self.discriminator = nd.Sequential(
            [
                layers.Dense(256, activation="leaky_relu", input_shape=(64,)),
                layers.Dropout(0.3),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dense(1),
            ]
        )
        self.of_generator = nd.optimizers.Adam(1e-3, beta_1=0.5)
        self.of_discriminator = nd.optimizers.Adam(5e-4, beta_1=0.5)
        self.loss = nd.losses.BinaryCrossentropy(from_logits=True)

    def step(self, images: Any) -> dict[str, Any]:
        """Update both models with this replica's part of a batch; return its part of the losses."""
        noise = nd.get_replica_context().rng.normal(size=(len(images), NOISE)).astype(np.float32)
        real, fake = np.full((len(images), 1), 0.9, np.float32), np.zeros((len(images), 1))
        with nd.GradientTape() as generating, nd.GradientTape() as discriminating:
            made = self.generator(noise, training=True)
            of_real = self.discriminator(images, training=True)
            of_made = self.discriminator(made, training=True)
            losses = {
                "discriminator": self.loss(real, of_real) + self.loss(fake, of_made),
                "generator": self.loss(np.ones_like(fake), of_made),
            }
        variables = self.discriminator.trainable_variables
        self.of_discriminator.minimize(losses["discriminator"], variables, discriminating)
        variables = self.generator.trainable_variables
        self.of_generator.minimize(losses["generator"], variables, generating)
        return losses

    def draw(self, count: int) -> Any:
        """Return generated images, the same in each call up to training."""
        noise = np.random.default_rng(0).normal(size=(count, NOISE)).astype(np.float32)
        return self.generator(noise)


def distance(images: Any, real: Any) -> float:
    """Return the mean Euclidean distance of images to the nearest real one."""
    squares = np.sum((images[:, np.newaxis] - real) ** 2, axis=-1)
    return float(np.mean(np.sqrt(squares.min(axis=1))))


def train(strategy: nd.Strategy, epochs: int, seed: int) -> Any:
    """Train; return the generated images and some real ones."""
    (images, _), (others, _) = load_data(seed)
    with strategy.scope():
        gan = GAN(seed)
    before = distance(gan.draw(DRAWN), images)
    dataset = nd.Dataset.from_tensor_slices(images).shuffle(len(images), seed=seed)
    batches = strategy.distribute_dataset(dataset.batch(BATCH))
    quiet = None if strategy.is_chief else True  # None: quiet without a terminal.
    losses: dict[str, float] = {}
    for epoch in tqdm(range(1, epochs + 1), unit="epoch", disable=quiet):
        parts = [strategy.reduce("sum", strategy.run(gan.step, args=(one,))) for one in batches]
        losses = {name: np.mean([float(part[name]) for part in parts]) for name in parts[0]}
        if strategy.is_chief and (epoch % max(1, epochs // 6) == 0 or epoch == epochs):
            shown = ", ".join(f"{name} loss {loss:.4f}" for name, loss in losses.items())
            tqdm.write(f"epoch {epoch}/{epochs}: {shown}")
    made = gan.draw(DRAWN)
    if strategy.is_chief:
        report(
            f"distance to the nearest digit: {distance(made, images):.3f}, "
            f"before training {before:.3f}, of unseen digits {distance(others, images):.3f}"
        )
    return made, images[:DRAWN]


def write_picture(generated: Any, real: Any, epochs: int, path: Path) -> None:
    """Write generated and real images side by side, as squares, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        report("no picture: pip install matplotlib")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    titles = f"generated, after {epochs} epochs", "real"
    for axes, images, title in zip(figure.subplots(1, 2), (generated, real), titles, strict=True):
        side = int(len(images) ** 0.5)
        cells = np.pad(images.reshape(side, side, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])
        square = cells.transpose(0, 2, 1, 3).reshape(10 * side, 10 * side)
        axes.imshow(square, cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title)
        axes.axis("off")
    figure.suptitle("Handwritten digits of 8 x 8 pixels")
    figure.savefig(path, dpi=120)
    report(f"wrote {path}")


def main() -> None:
    """Parse the command line, train, and write the picture."""
    parser = make_parser(__doc__, epochs=60)
    parser.add_argument("--picture", default="gan.png", help="a file, or '' for none")
    options = parser.parse_args()
    if options.strategy == "parameter_server" and serves():
        return
    with make_strategy(options.strategy, options.replicas) as strategy:
        generated, real = train(strategy, options.epochs, options.seed)
        if strategy.is_chief and options.picture:
            write_picture(generated, real, options.epochs, Path(options.picture))


if __name__ == "__main__":
    main()
