"""A conversation with a model: messages through a template to tokens, and the reply as it comes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from bessemer.common.errors import InputError
from bessemer.model.generation import Sampling, generate
from bessemer.model.transformer import Transformer
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import CHATML, chat_template, read_template, render, template_names

Message = dict[str, str]

# `plain` is for models that have seen text but no conversations: it looks like text. `chatml` is the layout of Qwen and
# SmolLM. A model that was trained on conversations brings its own template.
TEMPLATES = {
    "plain": "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ 'Question: ' if message.role == 'user' else 'Answer: ' }}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}",
    "chatml": CHATML,
}
REPLY_SHARE = 4  # a quarter of the model's positions, or the tokens asked for, is kept for a reply
STOPS = {"plain": ("\nQuestion:", "\nAnswer:"), "chatml": ("<|im_end|>",)}


class Chat:
    """A conversation: the messages so far, and how the next reply is made."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, template: Template, sampling: Sampling, system: str | None = None,
        ends: Collection[int] = (),
    ) -> None:  # fmt: skip
        """ends: ids at which a reply ends beside the template's stops; left out: end-of-text."""
        self.ends = ends or (tokenizer.end_of_text,)
        self.model, self.tokenizer, self.template, self.sampling = model, tokenizer, template, sampling
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.num_forgotten = 0  # messages, the oldest but the system's, that no longer fit into the model's positions
        self._system = len(self.messages)

    def reply(self, message: str, max_tokens: int) -> Iterator[str]:
        """The reply to a message of the user's, piece by piece; afterwards it is part of the conversation."""
        self.messages.append({"role": "user", "content": message})
        room = self.model.config.positions_length
        prompt = self._prompt()
        while len(prompt) + min(max_tokens, room // REPLY_SHARE) > room and self._forget():
            prompt = self._prompt()
        if len(prompt) >= room:
            self.messages.pop()
            raise InputError(
                f"the message has {len(prompt)} tokens, but the model reads only {room}; write a shorter one"
            )
        ids, text, shown = list[int](), "", ""
        stops = self.template.stops
        for token in generate(
            self.model, prompt, max_tokens=min(max_tokens, room - len(prompt)), sampling=self.sampling,
            ends=self.ends,
        ):  # fmt: skip
            if self.tokenizer.special.get(token) in stops:
                break
            ids.append(token)
            text = self.tokenizer.decode(ids)
            if ends := [text.find(stop) for stop in stops if stop in text]:
                text = text[: min(ends)]
                break
            sure = _without_beginning_of(text, stops)
            if len(sure) > len(shown):
                yield sure[len(shown) :]
                shown = sure
        if len(text) > len(shown):  # what was held back as a stop's possible beginning was none
            yield text[len(shown) :]
        self.messages.append({"role": "assistant", "content": text.strip()})

    def _prompt(self) -> list[int]:
        """The tokens of what is remembered of the conversation."""
        start = self._system + self.num_forgotten
        return self.tokenizer.encode_marked(self.template.render(self.messages[: self._system] + self.messages[start:]))

    def _forget(self) -> bool:
        """Leave out the oldest question and its answer; whether there was one."""
        can_forget = len(self.messages) - self._system - self.num_forgotten > 1
        self.num_forgotten += 2 * can_forget
        return can_forget


class Template:
    """A chat template (Jinja, as in `transformers`) and the strings at which a reply ends."""

    def __init__(self, source: str, stops: tuple[str, ...], names: dict[str, str]) -> None:
        self.stops, self._source, self._names = stops, source, names

    @classmethod
    def choose(cls, wanted: str | None, folder: Path, tokenizer: Tokenizer) -> Template:
        """The template of a name or a file; none: the one that lies beside the tokenizer, else `plain`."""
        names = template_names(folder, tokenizer.end_of_text_token)
        # Any special token of the vocabulary ends a reply: that is what they are for.
        marks = tuple(dict.fromkeys((tokenizer.end_of_text_token, *tokenizer.special.values())))
        if wanted is None and (own := chat_template(folder)) is not None:
            return cls(own, marks, names)
        if wanted is None or wanted in TEMPLATES:
            name = wanted or "plain"
            return cls(TEMPLATES[name], (*STOPS[name], *marks), names)
        if not Path(wanted).exists():
            raise InputError(f"--template: {wanted} is neither a file nor one of {', '.join(TEMPLATES)}")
        return cls(read_template(Path(wanted), "--template"), marks, names)

    def render(self, messages: list[Message]) -> str:
        """The conversation as text, ending where the reply begins."""
        return render(self._source, self._names, messages, add_generation_prompt=True)[0]


def _without_beginning_of(text: str, stops: tuple[str, ...]) -> str:
    """The text without what could be the beginning of a stop string, or half a character, at its end."""
    text = text.rstrip("\ufffd")
    begun = [size for stop in stops for size in range(1, len(stop) + 1) if text.endswith(stop[:size])]
    return text[: len(text) - max(begun, default=0)]
