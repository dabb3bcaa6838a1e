"""The tokenizer of an imported model: its tokenizer.json, special tokens, chat template and generation settings.

Special tokens are named in tokenizer_config.json or special_tokens_map.json, or given as ids in generation_config.json and
config.json; old folders (bert-base-uncased) name none, and only the tokenizer.json has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.common.errors import InputError
from bessemer.corpus.conversation import REASONING
from bessemer.recipe import Recipe
from bessemer.storage import hub
from bessemer.tokens.patterns import NORMALIZERS, pattern_of
from bessemer.tokens.pieces import Framing
from bessemer.tokens.tokenizer import Tokenizer, mask_token

if TYPE_CHECKING:
    from jinja2 import Environment

# Files copied with a tokenizer from a folder to a run and to the run's export.
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_SIDE_FILES = (CHAT_TEMPLATE, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
CHATML = (  # the layout of Qwen and SmolLM
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
USUAL = {
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}


def folder_of(path: str) -> Path:
    """The tokenizer's folder of a path, `hf:FOLDER` or `hf:ORG/NAME`."""
    if path.startswith("hf:"):
        return hub.local_folder(path, weights=False)
    return Path(path) if Path(path).is_dir() else Path(path).parent


def tokenizer_file(path: str) -> Path:
    """The tokenizer.json of a file, a folder, `hf:FOLDER` or `hf:ORG/NAME`; see `file_in`."""
    if not path.startswith("hf:") and not Path(path).is_dir():
        return Path(path)
    return file_in(folder_of(path))


def file_in(folder: Path) -> Path:
    """The tokenizer.json of a folder. Raises InputError where it has none."""
    if not (file := hub.foreign_file(folder, "tokenizer.json")).exists():
        raise InputError(
            f"{folder}: has no tokenizer.json; put the model's own there, or have transformers make one of older files: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return file


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing. Raises InputError when the file holds something else."""
    if not hub.foreign_file(path.parent, path.name).exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: is not a table of settings")
    return found


def special_tokens(tokenizer: Tokenizer, folders: Sequence[Path]) -> dict[str, str]:
    """A model's special tokens by role (bos, eos, pad, unk, cls, sep, mask): as the first of `folders` names them, else those
    that the tokenizer puts around a text or calls by a usual name."""
    special, tokens = tokenizer.special, dict[str, str]()
    for role in ROLES:
        named = [name for folder in folders for name in _names(folder, role) if tokenizer.id_of(name) is not None]
        by_id = [special[number] for folder in folders for number in ids_of(folder, role) if number in special]
        usual = [name for name in USUAL.get(role, ()) if name in special.values()]
        if candidates := [*named, *by_id, *usual]:
            tokens[role] = candidates[0]
    around = tokenizer.framing
    if around.after and not {"eos", "sep"} & tokens.keys():
        tokens["sep"] = special.get(around.after[-1], "")
    if tokenizer.unknown_token is not None:
        tokens.setdefault("unk", special.get(tokenizer.unknown_token, ""))
    return {role: content for role, content in tokens.items() if content}


def ids_of(folder: Path, role: str) -> list[int]:
    """The ids of a role in a folder, in the order in which `transformers` looks; eos may have several."""
    manifest = read_table(folder / "manifest.json").get("tokenizer", {})  # of a run of Bessemer
    ours = manifest.get({"eos": "end_of_text", "mask": "mask_token"}.get(role, ""))
    if ours is not None:
        return [int(ours)]
    return token_ids(folder / "generation_config.json", role) or token_ids(folder / "config.json", role)


def end_ids(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids at which `transformers` ends generation, of those that the vocabulary has."""
    return [number for number in ids_of(folder, "eos") if 0 <= number < tokenizer.vocabulary]


def token_ids(path: Path, role: str) -> list[int]:
    """The ids of a role in a JSON file. Raises InputError on what is no id."""
    value = read_table(path).get(f"{role}_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise InputError(f"{path}: {role}_token_id = {str(value)[:60]} must be a token's id, a whole number")
    return [int(number) for number in ids]


def _names(folder: Path, role: str) -> Iterator[str]:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        named = read_table(folder / file).get(f"{role}_token")
        content = named.get("content") if isinstance(named, dict) else named
        if isinstance(content, str) and content:
            yield content


def end_of_text(tokens: dict[str, str]) -> str | None:
    """The token that ends a text: eos, or an encoder's sep."""
    return tokens.get("eos") or tokens.get("sep")


def template_names(folder: Path, end_of_text: str) -> dict[str, str]:
    """Return special tokens by their names in chat templates, as `transformers` reads them from the settings in a folder.

    Without settings they are those of an exported model that was trained here.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= {key: value for key, value in read_table(folder / name).items() if value}
    if not settings:
        return dict.fromkeys(("bos_token", "eos_token", "pad_token"), end_of_text)
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: content for key, content in named.items() if key.endswith("_token") and isinstance(content, str)}


def read_template(path: Path, key: str = "chat template") -> str:
    """Return the text of a template file. Raises InputError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{key}: {path}: cannot be read: {error}") from None


def chat_template(folder: Path) -> str | None:
    """The chat template of a folder, the default one of several; None where it has none."""
    if (path := hub.foreign_file(folder, CHAT_TEMPLATE)).exists():
        return read_template(path)
    found = read_table(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def template_environment(marks: tuple[str, str] = ("", "")) -> Environment:
    """Jinja as `transformers` configures it for chat templates. marks: put around what the assistant says."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} stands around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return marks[0] + caller() + marks[1]

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment


class JinjaTemplate:
    """A compiled chat template. Raises InputError for one that does not compile."""

    def __init__(self, source: str, names: Mapping[str, str], marks: tuple[str, str] = ("", "")) -> None:
        try:
            self._template = template_environment(marks).from_string(source)
        except Exception as error:  # beside jinja's own, what Python's parser raises
            line = getattr(error, "lineno", None)
            raise InputError(f"chat template: {f'line {line}: ' if line else ''}{_reason(error)}") from None
        self._names = names

    def render(self, messages: Sequence[Mapping[str, Any]], /, **inputs: Any) -> str:
        """Return messages as text, with the inputs that `transformers` gives a template.

        Args:
            inputs: `add_generation_prompt`, `tools`, `documents` and options of the template.

        Raises:
            InputError: When the template fails.
        """
        inputs = {"tools": None, "documents": None, "add_generation_prompt": False, **self._names, **inputs}
        try:
            return self._template.render(messages=[_with_reasoning(one) for one in messages], **inputs)
        except Exception as error:  # a template is a program
            raise InputError(f"chat template: {_reason(error)}") from None


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under each name that templates know."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def load_for(recipe: Recipe) -> Tokenizer:
    """Load the tokenizer of tokenizer.path, with the special tokens that the recipe adds."""
    options, file, mask = recipe.tokenizer, tokenizer_file(str(recipe.tokenizer.path)), mask_token(recipe)
    if recipe.adds_tokens:
        return Tokenizer.load_any(file).with_special_tokens(options.special_tokens, options.end_of_text, mask)
    return Tokenizer.load(file, options.end_of_text, mask)


def train_for(recipe: Recipe, texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer as the recipe's [tokenizer] says."""
    options = recipe.tokenizer
    special = [*options.special_tokens, *(CHATML_TOKENS if recipe.chat_parts else ())]
    regex, form = pattern_of(options.pattern, options.digits, options.white_space), NORMALIZERS.get(options.pattern)
    end, mask = options.end_of_text, mask_token(recipe)
    return Tokenizer.train(texts, vocabulary, end, mask, special, regex, options.prefix_space, form)


def default_system(source: str, names: Mapping[str, str]) -> str | None:
    """Return the system prompt that a chat template writes by default; None where it writes none."""
    user, mark = {"role": "user", "content": "a"}, "\ufdd0"
    try:
        template = JinjaTemplate(source, names)
        plain = template.render([user])
        before, _, after = template.render([{"role": "system", "content": mark}, user]).partition(mark)
    except InputError:
        return None
    is_there = before and after and plain.startswith(before) and plain.endswith(after)
    return plain[len(before) : -len(after)] or None if is_there else None


def side_files(folder: Path) -> list[Path]:
    """The files of TOKENIZER_SIDE_FILES that a folder has."""
    return [file for name in TOKENIZER_SIDE_FILES if (file := hub.foreign_file(folder, name)).exists()]


def keeps_tokenizer(recipe: Recipe) -> bool:
    """True when a run starts from trained weights and keeps their tokenizer."""
    return recipe.tokenizer.path is not None and recipe.is_continued


def framing_of(recipe: Recipe, tokenizer: Tokenizer) -> Framing | None:
    """The ids around a text in a run from trained weights: the model's own bos, [CLS] and [SEP].

    None: end-of-text before each, as in a model trained here. A decoder's text has nothing after it, whatever its tokenizer adds.
    """
    if not keeps_tokenizer(recipe):
        return None
    kept = read_table(folder_of(str(recipe.tokenizer.path)) / "manifest.json").get("tokenizer")
    around, end = tokenizer.framing, tokenizer.end_of_text
    if kept is not None:  # a run of Bessemer
        around = Framing(tuple(kept.get("prefix") or ()), tuple(kept.get("suffix") or ()))
        if kept.get("prefix") is None:
            return None
    before, after = around.before, around.after
    if before == (end,):
        return None
    if recipe.train.objective == "causal":
        return Framing(before)
    if not before or not after:  # a decoder's text, or that of an encoder without tokens of its own
        return None if set(USUAL["mask"]) & set(tokenizer.special.values()) else Framing(before)
    return Framing(before, (*(after[:-1] if after[-1] == end else after), end))


def facts_of(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Facts for the tokens' manifest of the model that a run starts from: the ids around a text (prefix, suffix), those at
    which generation ends, the special tokens by role, and added tokens: the ids that each one's text had before. Empty for a
    model of its own."""
    if not keeps_tokenizer(recipe):
        return {}
    folder, around = folder_of(str(recipe.tokenizer.path)), framing_of(recipe, tokenizer)
    folders = [folder, *_model_folders(recipe)]
    kept = read_table(folder / "manifest.json").get("tokenizer", {})
    ends = kept.get("ends") or next((named for one in folders if (named := end_ids(one, tokenizer))), [])
    found: dict[str, Any] = {"special": special_tokens(tokenizer, folders)}
    found["ends"] = list(dict.fromkeys([*ends, tokenizer.end_of_text]))
    if recipe.adds_tokens:
        before = Tokenizer.load_any(tokenizer_file(str(recipe.tokenizer.path)))
        new = [name for name in recipe.tokenizer.special_tokens if before.id_of(name) is None]
        found["added"] = {str(tokenizer.id_of(name)): before.encode(name) for name in new}
    return found | ({"prefix": list(around.before), "suffix": list(around.after)} if around is not None else {})


def _model_folders(recipe: Recipe) -> list[Path]:
    """The folder of model.from, where there is one."""
    return [hub.local_folder(recipe.model.from_, weights=False)] if recipe.model.from_ else []


def carried_files(recipe: Recipe) -> list[Path]:
    """The files of TOKENIZER_SIDE_FILES in the folder of the tokenizer of the model that a run starts from."""
    if not keeps_tokenizer(recipe):
        return []
    return next(filter(None, map(side_files, (folder_of(str(recipe.tokenizer.path)), *_model_folders(recipe)))), [])


def followed(recipe: Recipe) -> Recipe:
    """The recipe with [tokenizer] resolved from an imported model: its tokenizer (with model.from alone), the commit of a hub
    model, end_of_text and mask_token. Values in the recipe stay."""
    tokenizer, masked = recipe.tokenizer, recipe.train.objective == "masked"
    path, changes = tokenizer.path, dict[str, Any]()
    if path is None and tokenizer.vocabulary is None:
        path = recipe.model.from_
    if path is None:
        return recipe
    if path.startswith("hf:") and hub.is_name(path.removeprefix("hf:")):
        path = f"hf:{hub.fetch_model(path.removeprefix('hf:'), weights=False).pinned}"
    if path != tokenizer.path:
        changes["path"] = path
    wanted = {"end_of_text", *(["mask_token"] if masked else [])} - tokenizer.model_fields_set
    if wanted:
        tokens = special_tokens(Tokenizer.load_any(tokenizer_file(path)), [folder_of(path), *_model_folders(recipe)])
        found = {"end_of_text": end_of_text(tokens), "mask_token": tokens.get("mask")}
        changes |= {key: token for key, token in found.items() if key in wanted and token}
    return recipe.changed(tokenizer=changes)
