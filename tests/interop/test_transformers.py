"""A model that the installed Transformers cuts by FSDP2 and tensor parallelism at once: saved, loaded, trained on.

Its tensor-parallel plan leaves norms and embeddings to FSDP2 alone, so they are on sibling meshes. Needs the extra
`interop`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_worlds import Case, run_world

DEADLINE_SECONDS = 400.0
"""Of one world; each rank imports Transformers."""

BOTH = {"fsdp_size": 2, "tp_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "four": (4, BOTH),
    "two of fsdp": (2, {"fsdp_size": 2}),
    "two of tp": (2, {"tp_size": 2}),
    "one": (1, {}),
}
"""By name: ranks, and how Transformers splits the model over them."""


@pytest.mark.timeout(900)
def test_fsdp2_and_tensor_parallelism_of_one_model_resume_on_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.interop.transformers_training import write_model

    write_model(tmp_path / "model")
    module = "tests.interop.transformers_training"
    training = Case(f"{module}:train", {"folder": str(tmp_path), "config": BOTH})
    for ranks in (4, 2, 1):
        cases = [
            Case(f"{module}:resume", {"folder": str(tmp_path), "config": config, "is_exact": ranks == 4}, name)
            for name, (size, config) in LAYOUTS.items()
            if size == ranks
        ]
        first = [training] if ranks == 4 else []
        results = run_world(ranks, first + cases, tmp_path / f"world{ranks}", deadline_seconds=DEADLINE_SECONDS)
        for each in cases:
            assert results.values(each.key()) == [2] * ranks
        if first:
            meshes = results.values("train")
            assert meshes[0] == ["('fsdp', 'tp') of ranks [0, 1, 2, 3]", "('fsdp',) of ranks [0, 2]"]
            assert meshes[1] == ["('fsdp', 'tp') of ranks [0, 1, 2, 3]", "('fsdp',) of ranks [1, 3]"]
