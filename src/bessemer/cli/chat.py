"""Chat with a model: messages are turned into tokens by a template, and replies are streamed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from bessemer.common.errors import InputError
from bessemer.model.transformer import Transformer
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import CHATML, chat_template, read_template, render, template_names
from bessemer.tokens.tokenizer.text_stream import stream_text
from bessemer.train.generation import Sampling, generate

Message = dict[str, str]

# `plain` looks like ordinary text, for models trained on text but not on conversations. `chatml` is the format of Qwen and
# SmolLM. A model trained on conversations has its own template.
TEMPLATES = {
    "plain": "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ 'Question: ' if message.role == 'user' else 'Answer: ' }}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}",
    "chatml": CHATML,
}
REPLY_SHARE = 4  # a quarter of the context, or max_tokens if smaller, is reserved for a reply
STOPS = {"plain": ("\nQuestion:", "\nAnswer:"), "chatml": ("<|im_end|>",)}


class Chat:
    """A conversation with a model.

    Attributes:
        messages: All messages so far, with `role` and `content`.
        num_forgotten: Number of oldest messages after the system message that no longer fit in the context.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, template: Template, sampling: Sampling, system: str | None = None,
        ends: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Start a conversation.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            template: Chat template.
            sampling: How to sample tokens.
            system: A system message before the conversation.
            ends: Ids that end a reply in addition to the template's stops; end-of-text by default.
        """
        self.ends = ends or (tokenizer.end_of_text,)
        self.model, self.tokenizer, self.template, self.sampling = model, tokenizer, template, sampling
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.num_forgotten = 0
        self._system = len(self.messages)

    def reply(self, message: str, max_tokens: int) -> Iterator[str]:
        """Yield the reply to a user message in pieces, and add both to the conversation.

        Args:
            message: Message of the user.
            max_tokens: Maximum number of tokens in the reply.

        Raises:
            InputError: The message alone does not fit in the model's context.
        """
        self.messages.append({"role": "user", "content": message})
        room = self.model.config.positions_length
        prompt = self._prompt()
        while len(prompt) + min(max_tokens, room // REPLY_SHARE) > room and self._forget():
            prompt = self._prompt()
        if len(prompt) >= room:
            self.messages.pop()
            raise InputError(f"the message has {len(prompt)} tokens, but the model reads {room}; write a shorter one")
        new = generate(
            self.model, prompt, max_tokens=min(max_tokens, room - len(prompt)), sampling=self.sampling, ends=self.ends
        )
        pieces = []
        for piece in stream_text(new, self.tokenizer, self.template.stops):
            pieces.append(piece)
            yield piece
        self.messages.append({"role": "assistant", "content": "".join(pieces).strip()})

    def _prompt(self) -> list[int]:
        """Return the tokens of the messages that are not forgotten."""
        start = self._system + self.num_forgotten
        return self.tokenizer.encode_marked(self.template.render(self.messages[: self._system] + self.messages[start:]))

    def _forget(self) -> bool:
        """Drop the oldest message and its reply. Return False if only the newest message is left."""
        can_forget = len(self.messages) - self._system - self.num_forgotten > 1
        self.num_forgotten += 2 * can_forget
        return can_forget


class Template:
    """A chat template (Jinja, as in `transformers`) and the strings that end a reply."""

    def __init__(self, source: str, stops: tuple[str, ...], names: dict[str, str]) -> None:
        self.stops, self._source, self._names = stops, source, names

    @classmethod
    def choose(cls, wanted: str | None, folder: Path, tokenizer: Tokenizer) -> Template:
        """Return the chosen chat template.

        Args:
            wanted: A key of TEMPLATES or a file. None: the template stored with the tokenizer, else `plain`.
            folder: Folder of the tokenizer.
            tokenizer: The tokenizer, whose special tokens end a reply.

        Raises:
            InputError: There is no such template or file.
        """
        names = template_names(folder, tokenizer.end_of_text_token)
        # Any special token ends a reply, because special tokens only mark structure.
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
        """Return the conversation as text that ends where the reply begins."""
        return render(self._source, self._names, messages, add_generation_prompt=True)[0]
