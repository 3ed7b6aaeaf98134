"""Usage totals and the keys they are kept under."""

from __future__ import annotations

import pytest

from services.gateway.usage import UsageRecord, totals
from shared import keys

DAY = 86_400.0


def test_records_are_summed_per_tenant_day_and_pool() -> None:
    records = [
        UsageRecord("default", "m", 10, 5, 4, 0.0),
        UsageRecord("default", "m", 1, 2, 0, DAY - 0.01),
        UsageRecord("default", "m-2", 7, 7, 7, DAY - 0.01),
        UsageRecord("default", "m", 100, 50, 40, DAY),
        UsageRecord("other", "m", 3, 3, 3, 0.0),
    ]
    assert totals(records) == {
        ("default", "19700101"): {
            "m:prompt": 11,
            "m:completion": 7,
            "m:cached": 4,
            "m:requests": 2,
            "m-2:prompt": 7,
            "m-2:completion": 7,
            "m-2:cached": 7,
            "m-2:requests": 1,
        },
        ("default", "19700102"): {"m:prompt": 100, "m:completion": 50, "m:cached": 40, "m:requests": 1},
        ("other", "19700101"): {"m:prompt": 3, "m:completion": 3, "m:cached": 3, "m:requests": 1},
    }


def test_keys_of_one_tenant_share_a_hash_tag() -> None:
    assert keys.usage_day("default", "20261130") == "hr:usage:{default}:20261130"
    assert "{default}" in keys.usage_batch("default", "ab12")
    assert keys.usage_field("m", "prompt") == "m:prompt"


@pytest.mark.parametrize("text", ["", "a b", "a:b", "{x}", "A", "a" * 64, "ü", "a\n"])
def test_keys_take_minted_ids_only(text: str) -> None:
    with pytest.raises(ValueError, match="not an id"):
        keys.usage_day(text, "20261130")
    with pytest.raises(ValueError, match="not an id"):
        keys.usage_field(text, "prompt")
    with pytest.raises(ValueError, match="not a day"):
        keys.usage_day("default", text)
