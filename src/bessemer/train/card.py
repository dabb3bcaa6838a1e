"""The model card (README.md) of an export: what the model is, how to use it, what it was made from and how well it does.

The header is YAML that the Hugging Face hub reads (huggingface.co/docs/hub/model-cards). No path of this machine stands in
it: sources are given by their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer import __version__
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import family_of
from bessemer.model.huggingface.families import FAMILIES
from bessemer.recipe import Recipe, digest
from bessemer.run import RunFolder, read_json
from bessemer.terminal import amount, size
from bessemer.tokens.shards import TokenStore

KINDS = {  # pipeline of transformers, its class, what the model is called
    "causal": ("text-generation", "AutoModelForCausalLM", "language model"),
    "masked": ("fill-mask", "AutoModelForMaskedLM", "masked language model"),
    "classify": ("text-classification", "AutoModelForSequenceClassification", "classifier"),
}


def model_card(
    recipe: Recipe, run: RunFolder, store: TokenStore, config: ModelConfig, step: int, check: Mapping[str, Any]
) -> str:
    """The text of README.md for the weights of a step. check: what the export's gate measured; of a GGUF file, its facts."""
    evaluation = read_json(run.evaluation) if run.evaluation.exists() else {}
    imported = (run.source / "config.json").exists()
    sections = [
        _header(recipe, run, config, evaluation, "gguf" if "gguf" in check else "transformers"),
        _title(recipe, store, config, imported),
        _use_gguf(store, check["gguf"], recipe.run.name) if "gguf" in check else _use(store, config),
        "" if imported else _data(store),
        "" if imported else _evaluation(evaluation, step),
        "" if imported else _training(recipe, run, step),
        _checked(check),
        _licence(run),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _kind(config: ModelConfig) -> str:
    return "classify" if config.labels else "causal" if config.causal else "masked"


def _header(recipe: Recipe, run: RunFolder, config: ModelConfig, evaluation: Mapping[str, Any], library: str) -> str:
    task = KINDS[_kind(config)][0]
    lines = [
        f"library_name: {library}",
        f"pipeline_tag: {task}",
        f"license: {source_licence(run) or 'unknown'}",
        "tags:",
        "- bessemer",
        f"- {family_of(config)}",
    ]
    scores = {key: evaluation[key] for key in ("bits_per_byte", "accuracy") if evaluation.get(key) is not None}
    if scores:
        lines += [
            "model-index:", f"- name: {json.dumps(recipe.run.name)}", "  results:", "  - task:", f"      type: {task}",
            "    dataset:", "      name: held-out documents of the training sources", "      type: held-out", "    metrics:",
        ]  # fmt: skip
        for name, value in scores.items():
            lines += [f"    - type: {name}", f"      value: {value:.6g}"]
    return "\n".join(["---", *lines, "---"])


def _title(recipe: Recipe, store: TokenStore, config: ModelConfig, imported: bool) -> str:
    family = FAMILIES[family_of(config)].title
    what = f"A {family} {KINDS[_kind(config)][2]} of {amount(config.parameters)} parameters"
    come = "imported into Bessemer and exported again" if imported else "trained from raw text with Bessemer"
    lines = [
        f"# {recipe.run.name}",
        f"{what}, {come} (version {__version__}): {config.layers} layers, width {config.width}, {config.heads} heads "
        f"({config.kv_heads} key/value), vocabulary {config.vocabulary:,}, {config.positions_length:,} positions.",
    ]
    if config.labels:
        lines.append(f"Classes: {', '.join(f'`{label}`' for label in store.labels)}.")
    return "\n\n".join(lines)


def _use(store: TokenStore, config: ModelConfig) -> str:
    task, kind, _ = KINDS[_kind(config)]
    calls = {
        "causal": 'generate("Once upon a time", max_new_tokens=50, do_sample=False)',
        "masked": 'fill(f"The time {fill.tokenizer.mask_token} come")',
        "classify": 'classify(["a text", "another text"], truncation=True)',
    }
    name, _, _ = calls[_kind(config)].partition("(")
    code = [
        "from transformers import AutoTokenizer, " + f"{kind}, pipeline", "",
        f'{name} = pipeline("{task}", model="path/to/this/folder")', f"print({calls[_kind(config)]})", "",
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
        f'model = {kind}.from_pretrained("path/to/this/folder")',
    ]  # fmt: skip
    lines = ["## Use", "\n".join(["```python", *code, "```"]), _prepended(store)]
    if config.labels:
        lines.append(
            f"Texts of more than {config.sequence_length:,} tokens are cut to their beginning, as in training, when "
            "`truncation=True` is given."
        )
    return "\n\n".join(lines)


def _use_gguf(store: TokenStore, file: str, name: str) -> str:
    code = [
        f'llama-cli -m {file} -no-cnv -p "Once upon a time" --temp 0',
        f"ollama create {name.lower()} -f Modelfile && ollama run {name.lower()}",
    ]
    return "\n\n".join(["## Use", "\n".join(["```bash", *code, "```"]), _prepended(store)])


def _prepended(store: TokenStore) -> str:
    """What stands around a text, in words."""
    tokens = json.loads((store.folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    name_of = {token["id"]: f"`{token['content']}` (id {token['id']})" for token in tokens}
    before, after = (
        ", ".join(name_of.get(number, f"id {number}") for number in side)
        for side in (store.framing.before, store.framing.after)
    )
    if not before and not after:
        return "The tokenizer puts no token before or after a text."
    around = " and ".join(f"{ids} {where}" for ids, where in ((before, "before"), (after, "after")) if ids)
    why = "; in training it stood before each document" if store.sources else ""
    return (
        f"The tokenizer puts {around} every text by default{why}. Do not add it a second time, and give programs that tokenize "
        "by themselves the same. Text that looks like a special token is read as that token unless "
        "`split_special_tokens=True` is given."
    )


def _data(store: TokenStore) -> str:
    rows = []
    for name, splits in store.manifest["sources"].items():
        train, held_out = splits["train"], splits["heldout"]
        rows.append(
            (name, *(f"{split[kind]:,}" for split in (train, held_out) for kind in ("documents", "tokens")), size(train["bytes"]))
        )  # fmt: skip
    facts = store.manifest["tokenizer"]
    return "\n\n".join(
        [
            "## Data",
            _table(
                ("source", "documents", "tokens", "held-out documents", "held-out tokens", "text to train on"), rows
            ),
            f"Tokenizer: {facts['vocabulary']:,} ids, "
            + ("trained on this text." if facts.get("trained") else "brought along, not trained on this text.")
            + (f" {facts['bytes_per_token']:.2f} bytes of text a token." if facts.get("bytes_per_token") else ""),
        ]
    )


def _evaluation(found: Mapping[str, Any], step: int) -> str:
    if not found:
        return "## Evaluation\n\nNot evaluated: `bessemer evaluate RUN` had not been run when this was exported."
    rows = [("loss (nats a target)", f"{found['loss']:.4f}")]
    if found.get("bits_per_byte") is not None:
        rows.append(("bits per byte", f"{found['bits_per_byte']:.4f}"))
    if found.get("ngram"):
        ngram = found["ngram"]
        rows.append(
            (f"bits per byte of a byte {ngram['order']}-gram on the same text", f"{ngram['bits_per_byte']:.4f}")
        )
    if found.get("accuracy") is not None:
        rows.append(("accuracy", f"{found['accuracy']:.1%}"))
    lines = [
        "## Evaluation",
        f"On {found['tokens']:,} held-out targets of the same sources, which were not trained on"
        + ("" if found["step"] == step else f"; by the weights of step {found['step']:,}, not those exported")
        + ". These are no benchmark scores.",
        _table(("measure", "value"), rows),
    ]
    if found.get("classes"):
        scores = ("precision", "recall", "f1")
        rows = [
            (row["label"], f"{row['texts']:,}", *("" if row[key] is None else f"{row[key]:.3f}" for key in scores))
            for row in found["classes"]
        ]  # type: ignore[misc]
        lines.append(_table(("class", "texts", *scores), rows))
    return "\n\n".join(lines)


def _training(recipe: Recipe, run: RunFolder, step: int) -> str:
    train = recipe.train
    environment = read_json(run.environment) if run.environment.exists() else {}
    batch = train.global_batch_tokens or 0
    versions = [f"Bessemer {environment.get('bessemer', __version__)}"]
    versions += [f"torch {environment['torch']}"] if environment.get("torch") else []
    rows = [
        ("objective", train.objective),
        ("steps", f"{step:,}"),
        ("batch", f"{batch:,} tokens in sequences of {recipe.tokens.sequence_length:,}"),
        ("optimizer", f"{train.optimizer.kind}, learning rate {train.optimizer.learning_rate}"),
        ("precision", str(environment.get("precision") or train.precision)),
        ("seed", str(recipe.run.seed)),
        ("recipe", f"`{digest(recipe)[:16]}` (digest of the resolved recipe)"),
        ("trained with", ", ".join(versions)),
    ]  # fmt: skip
    if recipe.model.from_ is not None:
        rows.insert(1, ("started from", f"`{Path(recipe.model.from_.removeprefix('hf:')).name}`"))
    return "## Training\n\n" + _table(("", ""), rows)


def _checked(check: Mapping[str, Any]) -> str:
    if "gguf" in check:
        return (
            f"## Checked\n\n{check['tensors']} tensors were read back and equal the run's weights in {check['type']}. Text is "
            f"cut as by llama.cpp's pre-tokenizer `{check['pre_tokenizer']}`."
        )
    if "logits_max_difference" not in check:
        return f"## Checked\n\n{check['tensors']} tensors were read back and are equal; logits were {check['logits']}."
    parts = [
        f"logits within {check['logits_max_difference']:.1e}",
        f"the ids of {check['tokenizer_documents_equal']} texts",
    ]
    if check["greedy_tokens_equal"]:
        parts.append(f"{check['greedy_tokens_equal']} greedily generated tokens")
    return (
        f"## Checked\n\n`transformers` {check['transformers']}, from this folder alone, gave the same as the trainer before "
        f"the folder was published: every tensor, {', '.join(parts)}."
    )


def _licence(run: RunFolder) -> str:
    found = source_licence(run)
    if found:
        return f"## Licence\n\nThe card of the imported model, README-source.md, says `{found}`."
    return (
        "## Licence\n\nNot stated. Whoever publishes this model decides, with regard to the licences of the data, and writes it "
        "into the header."
    )


def source_licence(run: RunFolder) -> str | None:
    """The licence in the header of an imported model's own card."""
    card = run.source / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.exists() else []
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return None
    header = lines[1 : lines.index("---", 1)]
    found = next((line.partition(":")[2].strip() for line in header if line.startswith("license:")), "")
    return found if found.replace("-", "").replace(".", "").replace("_", "").isalnum() else None


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
