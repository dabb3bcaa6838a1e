"""An Ollama Modelfile beside a GGUF file (ollama/ollama, docs/modelfile.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Chat templates are Jinja in a GGUF and Go templates in a Modelfile. ChatML is the one that is written here; where the model
# has another, none is: Ollama then takes the one it knows for the template in the GGUF.
PLAIN = "{{ .Prompt }}"
CHATML = "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "repetition_penalty": "repeat_penalty"}


def modelfile(
    file: str, positions: int, stops: Sequence[str], generation: Mapping[str, Any], chat_template: str | None
) -> str:
    """The Modelfile of a GGUF file in the same folder.

    positions: of the context; stops: texts that end a reply; generation: of a generation_config.json; chat_template: Jinja,
    None: a model that continues text.
    """
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {positions}"]
    for theirs, name in PARAMETERS.items():
        if generation.get(theirs) is not None:
            lines.append(f"PARAMETER {name} {generation[theirs]}")
    template = PLAIN if chat_template is None else CHATML if "<|im_start|>" in chat_template else None
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    if template == CHATML:
        stops = [*stops, "<|im_end|>"]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in dict.fromkeys(stops)]
    return "\n".join(lines) + "\n"
