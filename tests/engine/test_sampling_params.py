"""What sampling rules refuse when they are made."""

from typing import Any

import pytest

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"top_k": "all"},
        {"stop": 5},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": None},
        {"max_tokens": "7"},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=rf"Expected .* at `.*\.?{next(iter(wrong))}"):
        SamplingParams(**wrong)
