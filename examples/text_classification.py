"""Tell praise from complaint in sentences of a small grammar, with the strategy of your choice.

    python examples/text_classification.py --strategy mirrored --replicas 2
    ndistribute run -n 2 examples/text_classification.py --strategy multi_worker
    ndistribute run --workers 2 --ps 2 examples/text_classification.py --strategy parameter_server

It shows a subclass of `Model` with embeddings and attention, and sparse gradients: of the large
table of words, only the rows that a batch uses travel between replicas or to servers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from train_digits import make_parser, make_strategy, report, serves

import ndistribute as nd
from ndistribute import layers

GOOD = "good great fine lovely splendid superb cosy friendly quick tasty honest clever".split()
BAD = "bad awful poor ugly dreadful rude slow stale noisy boring dirty broken".split()
SYLLABLES = "ba ko mi ru ta le so ni va du fe lo ri pa".split()
# Names of places, of which each appears in few sentences.
NAMES = [a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]
THINGS = "room food staff music price garden".split()
WORDS = ["", *"the in was not very really but and".split(), *GOOD, *BAD]
WORDS += THINGS + NAMES
INDEX = {word: index for index, word in enumerate(WORDS)}
LENGTH, WIDTH = 18, 32


def sentence(rng: np.random.Generator) -> tuple[list[str], int]:
    """Return the words of a sentence, and 1 for praise or 0 for complaint.

    ``clause = the THING in PLACE was [not] [very | really] QUALITY``, and "not" turns its sense;
    ``sentence = clause | clause and clause of the same sense | clause but clause``, in which the
    second clause counts.
    """

    def one_of(*words: str) -> str:
        return words[rng.integers(len(words))]

    def clause(praises: bool) -> list[str]:
        negated = rng.random() < 0.4
        said = ["the", one_of(*THINGS), "in", one_of(*NAMES), "was"]
        said += [("not" if negated else ""), one_of("", "very", "really")]
        return [*filter(None, said), one_of(*(GOOD if praises != negated else BAD))]

    praises, form = bool(rng.integers(2)), rng.integers(3)
    if form == 0:
        return clause(praises), int(praises)
    if form == 1:
        return [*clause(praises), "and", *clause(praises)], int(praises)
    return [*clause(not praises), "but", *clause(praises)], int(praises)


def load_text(count: int, seed: int) -> tuple[Any, Any]:
    """Return sentences as rows of indices of words, filled up with 0, and their labels."""
    rng = np.random.default_rng(seed)
    words, labels = np.zeros((count, LENGTH), np.int64), np.zeros(count, np.int64)
    for row in range(count):
        said, labels[row] = sentence(rng)
        words[row, : len(said)] = [INDEX[word] for word in said]
    return words, labels


class Classifier(nd.Model):
    """Embeddings of words and positions, one block of attention, and the mean of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(len(WORDS), WIDTH)
        self.positions = layers.Embedding(LENGTH, WIDTH)
        self.attention = layers.MultiHeadAttention(num_heads=4, key_dim=8)
        self.normalization = layers.LayerNormalization()
        self.hidden = layers.Dense(WIDTH, activation="relu")
        self.output = layers.Dense(2)

    def call(self, words: Any) -> Any:
        """Return two logits for each sentence."""
        present = words != INDEX[""]
        x = self.words(words) + self.positions(np.arange(LENGTH))
        x = x + self.attention(x, x, attention_mask=present[:, np.newaxis])
        x = self.hidden(self.normalization(x))
        weights = present / np.maximum(present.sum(axis=1, keepdims=True), 1)
        return self.output(np.sum(x * weights[..., np.newaxis].astype(np.float32), axis=1))


def rows_of_gradient(model: Classifier, words: Any, labels: Any) -> int:
    """Return how many rows the gradient of the table of words has for a batch."""
    with nd.GradientTape() as tape:
        loss = model.loss(labels, model(words))
    gradient = tape.gradient(loss, model.words.embeddings)
    return len(np.unique(gradient.indices))


def train(strategy: nd.Strategy, epochs: int, seed: int) -> None:
    """Train, and print what was reached."""
    words, labels = load_text(6000, seed)
    test = load_text(500, seed + 1)
    with strategy.scope():
        nd.set_seed(seed)
        model = Classifier()
        loss = nd.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(nd.optimizers.Adam(0.005), loss, metrics=["accuracy"])
    model.fit(words, labels, batch_size=100, epochs=epochs)
    accuracy = model.evaluate(*test, verbose=0)[1]
    if strategy.is_chief:
        rows = rows_of_gradient(model, words[:100], labels[:100])
        report(
            f"rows in the gradient of a batch: {rows} of {len(WORDS)}\n"
            f"{strategy.num_replicas_in_sync} replica(s): test accuracy {accuracy:.4f}"
        )


def main() -> None:
    """Parse the command line and train."""
    options = make_parser(__doc__, epochs=5).parse_args()
    if options.strategy == "parameter_server" and serves():
        return
    with make_strategy(options.strategy, options.replicas) as strategy:
        train(strategy, options.epochs, options.seed)


if __name__ == "__main__":
    main()
