"""The table of DeepSpeed's keys against the installed DeepSpeed, which is asked for them."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS as REMOVED
from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ValidationError

from sgt_ds.config.deepspeed_keys import NAMES_OF, SECTIONS, TOP_LEVEL


class Asked(dict[str, Any]):
    """A configuration that notes for which keys it is asked."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.keys_asked: set[str] = set()

    def __copy__(self) -> Asked:
        return self

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # of which DeepSpeed asks `in`


def test_a_key_that_deepspeed_reads_is_refused_or_one_that_it_does_not_read_is_taken() -> None:
    data_types, timers = Asked(), Asked()
    asked = Asked(train_batch_size=1, data_types=data_types, timers=timers)
    DeepSpeedConfig(asked)
    # The old name of bf16 has a message of its own, and so have keys that were removed.
    assert asked.keys_asked - set(REMOVED) - {"bfloat16"} == TOP_LEVEL.keys()
    assert data_types.keys_asked == SECTIONS["data_types"].keys()
    assert timers.keys_asked == SECTIONS["timers"].keys()


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("zero_optimization", DeepSpeedZeroConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
    ],
)
def test_a_key_of_a_section_is_another_in_deepspeed(section: str, model: type[BaseModel]) -> None:
    known, fields = SECTIONS[section], model.model_fields
    aliases = {field.alias: field for field in fields.values() if field.alias is not None}
    assert known.keys() == {**fields, **aliases}.keys()
    for key, field in {**fields, **aliases}.items():
        if section != "fp16":  # its other keys are not checked: it cannot be enabled
            flag = field.annotation in (bool, bool | None)
            assert known[key].holds(True) is (flag or key == "stage"), key
            for value in (0, 1) if known[key].holds(1) and key != "stage" else ():
                assert known[key].holds(value) is _takes(model, key, value), (key, value)


def _takes(model: type[BaseModel], key: str, value: int) -> bool:
    try:
        model(**{key: value})
    except ValidationError:
        return False
    return True


def test_a_name_of_a_data_type_means_another_in_deepspeed() -> None:
    for name, words in NAMES_OF.items():
        assert {DtypeEnum(word).name for word in words} == {name}
