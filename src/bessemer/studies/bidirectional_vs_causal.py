"""The same transformer trained twice on the same real text for the same number of tokens: to predict the next token from
the left, and to predict hidden tokens from both sides. Then both are asked the same things.

- Fill in: a hidden word in the middle of held-out text. The bidirectional model sees both sides. The causal one sees the
  left; beside it, the same model that scores its 16 likeliest words by the likelihood of the whole text, which is how a
  causal model can use the right side, at 16 times the work.
- Go on: the last token of a text. The causal model predicts it as it predicts every other one; the bidirectional one has
  a mask put there.
- Classify: which package a snippet comes from, by a head on the frozen model, and with the whole model trained.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bessemer.evaluate.final import word_near_the_middle
from bessemer.report.static import bar_chart
from bessemer.studies.library import (
    PACKAGES,
    ClassifierStudy,
    Snippets,
    classifier,
    pretrained,
    tokens_of,
    train_classifier,
)
from bessemer.terminal import amount, text_table
from bessemer.tokens.held_out import held_out
from bessemer.tokens.pieces import WordEdges
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.trainer import Trainer
from bessemer.train.validation import validate

expected = (
    "The model that sees both sides fills gaps better and cannot continue a text; for a classifier, sides matter little at "
    "this size (Devlin et al. 2019, section 5.1, found that they matter at BERT's)."
)
KINDS = {"causal": ("causal", "qwen3"), "bidirectional": ("masked", "modernbert")}
QUESTIONS = 400
CANDIDATES = 16
ROWS = 16  # sequences in one forward pass of the questions

Ids = npt.NDArray[np.int64]


def run(settings: ClassifierStudy | None = None) -> dict[str, Any]:
    """Train both and ask. Returns `settings`, `questions`, `chance`, and by kind: parameters, tokens, fill_in,
    next_token (each accuracy and nats), probe and fine_tuned (accuracies), for the causal one fill_in_rescored."""
    sizes = settings or ClassifierStudy()
    results: dict[str, Any] = {"settings": asdict(sizes), "chance": 1 / len(PACKAGES)}
    with tempfile.TemporaryDirectory() as folder:
        store = tokens_of(sizes, Path(folder))
        texts, places = _questions(store, sizes.length)
        results["questions"] = len(texts)
        train = Snippets.of(store, "train", sizes.snippet, sizes.train_snippets, sizes.seed)
        test = Snippets.of(store, "heldout", sizes.snippet, sizes.test_snippets, sizes.seed)
        for kind, (objective, family) in KINDS.items():
            trainer = pretrained(sizes, store, objective, family)
            tokens = sizes.steps * sizes.sequences * sizes.length
            row: dict[str, Any] = {"parameters": trainer.model.config.parameters, "tokens": tokens}
            assert store.mask_token is not None
            last = np.full(len(texts), sizes.length - 1)
            row["fill_in"] = _answers(trainer, texts, places, store.mask_token)
            row["next_token"] = _answers(trainer, texts, last, store.mask_token)
            if kind == "causal":
                row["fill_in_rescored"] = _rescored(trainer, texts, places)
            for name, frozen in (("probe", True), ("fine_tuned", False)):
                head = classifier(sizes, store, trainer, "qwen3", kind == "causal", frozen)
                train_classifier(sizes, head, train, f"{name}, {kind}")
                row[name] = validate(head, [test.held_out()]).accuracy
            results[kind] = row
    return results


def table(result: dict[str, Any]) -> str:
    causal, both, settings = result["causal"], result["bidirectional"], result["settings"]

    def scored(row: dict[str, float]) -> str:
        return f"{row['accuracy']:.1%} ({row['nats']:.2f} nats)"

    rows = [
        ("a hidden word in the middle", scored(causal["fill_in"]), scored(both["fill_in"])),
        (f"  its {CANDIDATES} best words, text rescored", f"{causal['fill_in_rescored']:.1%}", "not needed"),
        ("the last token of a text", scored(causal["next_token"]), scored(both["next_token"])),
        ("predictions in one forward pass", f"{settings['length']}", "1, or the hidden share"),
        ("writes text", "yes", "no"),
        (f"which of {len(PACKAGES)} packages, head only", f"{causal['probe']:.1%}", f"{both['probe']:.1%}"),
        ("  the whole model trained", f"{causal['fine_tuned']:.1%}", f"{both['fine_tuned']:.1%}"),
    ]
    return "\n".join([
        f"The same {amount(causal['parameters'])}-parameter transformer, {amount(causal['tokens'])} tokens of Python's standard "
        "library each;",
        f"{result['questions']} questions on held-out files; chance for the packages: {result['chance']:.1%}.", "",
        *text_table(("", "causal: sees the left", "bidirectional: both sides"), rows),
    ])  # fmt: skip


def shows(results: dict[str, Any]) -> list[str]:
    causal, both = results["causal"], results["bidirectional"]
    kinds = {True: "bidirectional", False: "causal"}
    better = {name: kinds[both[name]["accuracy"] > causal[name]["accuracy"]] for name in ("fill_in", "next_token")}
    return [
        f"In the middle of a text the {better['fill_in']} model is better: {causal['fill_in']['accuracy']:.1%} right with "
        f"the left side, {both['fill_in']['accuracy']:.1%} with both; at its end the {better['next_token']} one, "
        f"{causal['next_token']['accuracy']:.1%} and {both['next_token']['accuracy']:.1%}.",
        f"A causal model that rescores its {CANDIDATES} best words by the whole text reaches "
        f"{causal['fill_in_rescored']:.1%}, at {CANDIDATES} times the work.",
        f"As classifiers, trained whole, they are right in {causal['fine_tuned']:.1%} and {both['fine_tuned']:.1%}.",
    ]


def plot(results: dict[str, Any]) -> str:
    bars = [
        (f"{name}, {kind}", results[kind][key]["accuracy"])
        for key, name in (("fill_in", "middle"), ("next_token", "last token")) for kind in KINDS
    ]  # fmt: skip
    bars += [(f"packages, {kind}", results[kind]["fine_tuned"]) for kind in KINDS]
    return bar_chart("Accuracy on held-out text", [(name, value, f"{value:.1%}") for name, value in bars])


def _questions(store: TokenStore, length: int) -> tuple[Ids, Ids]:
    """Held-out texts, and in each the place of a word of one token near its middle."""
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", "<|endoftext|>")
    edges = WordEdges.of(tokenizer.token_pieces())
    rows = np.concatenate([part.inputs[:, :length] for part in held_out(store, length)])
    rows = rows[~(rows[:, -1] == store.end_of_text)]
    chosen = np.unique(np.linspace(0, len(rows) - 1, QUESTIONS).astype(np.int64))
    results = [(row, place) for row in rows[chosen] if (place := word_near_the_middle(row, edges, store.token_bytes))]
    return np.stack([row for row, _ in results]), np.array([place for _, place in results])


@torch.no_grad()
def _answers(trainer: Trainer, texts: Ids, places: Ids, mask_token: int) -> dict[str, float]:
    """How often the token at each place is the likeliest, and its mean cross-entropy in nats.

    A causal model's prediction for a place stands at the place before; a bidirectional one's behind the mask itself.
    """
    right, nats = 0, 0.0
    for start in range(0, len(texts), ROWS):
        rows, here = texts[start : start + ROWS].copy(), places[start : start + ROWS]
        number = np.arange(len(rows))
        wanted = torch.from_numpy(rows[number, here])
        if not trainer.model.config.causal:
            rows[number, here] = mask_token
        logits_BTV = trainer.model.logits(torch.from_numpy(rows))
        logits_BV = logits_BTV[torch.from_numpy(number), torch.from_numpy(here - int(trainer.model.config.causal))]
        right += int((logits_BV.argmax(dim=1) == wanted).sum())
        nats += float(torch.nn.functional.cross_entropy(logits_BV, wanted, reduction="sum"))
    return {"accuracy": right / len(texts), "nats": nats / len(texts)}


@torch.no_grad()
def _rescored(trainer: Trainer, texts: Ids, places: Ids) -> float:
    """Accuracy of a causal model that tries its likeliest words and takes the one under which the text is likeliest."""
    right = 0
    for text, place in zip(texts, places.tolist(), strict=True):
        row = torch.from_numpy(text)
        best = trainer.model.logits(row[None, :place])[0, -1].topk(CANDIDATES).indices
        tried_BT = row.repeat(CANDIDATES, 1)
        tried_BT[:, place] = best
        log_BTV = trainer.model.logits(tried_BT[:, :-1])[:, place - 1 :].log_softmax(dim=-1)
        text_B: Tensor = log_BTV.gather(2, tried_BT[:, place:, None]).sum(dim=(1, 2))
        right += int(best[text_B.argmax()] == row[place])
    return right / len(texts)
