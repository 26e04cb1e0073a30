"""The corpus: crafted runs, each with a name, what is wrong with it, and who must be the first to say so.

They are kept as code, which says what each of them is; every digest in them fits what it covers.
"""

from __future__ import annotations

from tests.hostile.cases import Case
from tests.hostile.corpus_coded import CASES as CODED
from tests.hostile.corpus_files import CASES as FILES
from tests.hostile.corpus_health import CASES as HEALTH
from tests.hostile.corpus_index import CASES as INDEXES
from tests.hostile.corpus_manifest import CASES as MANIFESTS
from tests.hostile.corpus_packs import CASES as PACKS
from tests.hostile.corpus_references import CASES as REFERENCES
from tests.hostile.corpus_steps import CASES as STEPS
from tests.hostile.corpus_values import CASES as VALUES

CASES: list[Case] = [*MANIFESTS, *VALUES, *INDEXES, *PACKS, *FILES, *REFERENCES, *STEPS, *HEALTH, *CODED]
"""Every case, in a fixed order."""

assert len({case.name for case in CASES}) == len(CASES), "names of cases are distinct"
