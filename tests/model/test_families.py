"""Facts of the model families compared with the installed `transformers`."""

import importlib
import inspect
import re

import pytest

from bessemer.export.family_trial import require_same_keys
from bessemer.model.huggingface.families import FAMILIES, READ_ANYWHERE, ModelFamily

transformers = pytest.importorskip("transformers")
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@each_family
def test_keys_that_transformers_reads_are_not_marked_unread(family: ModelFamily) -> None:
    """Read its sources: those of the model, and of the masks and rotary positions that all models share."""
    ours = family.known | READ_ANYWHERE
    theirs = transformers.AutoConfig.for_model(family.model_type)
    modules = ("masking_utils", "modeling_rope_utils")
    sources = [inspect.getmodule(getattr(transformers, family.architecture))]
    sources += [importlib.import_module(f"transformers.{name}") for name in modules]
    text = "\n".join(map(inspect.getsource, sources))
    read = set(re.findall(r'\bconfig\.(\w+)|(?:get|has)attr\(\s*(?:self\.)?config,\s*"(\w+)"', text))
    names = {name for pair in read for name in pair if name and not callable(getattr(theirs, name, None))}
    seen = {"image_token_id", "mm_tokens_per_image", "text_config", "vision_config"}  # of Gemma 3 with images
    elsewhere = {"rope_parameters", "classifier_dropout"}  # of rotary positions, and of a head for tokens
    assert names - ours - seen - elsewhere <= {"default_theta", "json", "summary_last_dropout", "__class__"}
    assert set(theirs.attribute_map) <= ours


@each_family
def test_keys_and_defaults_equal_those_of_transformers(family: ModelFamily) -> None:
    require_same_keys(family)
    theirs = transformers.AutoConfig.for_model(family.model_type).to_dict()
    assert all(theirs.get(key, fixed) == fixed for key, fixed in family.fixed.items())
    assert not set(family.harmless) & family.understood
