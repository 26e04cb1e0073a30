"""The model types of Transformers with a mapping, and the rules that they become.

python -m tests.interop.layouts.compiled_types --write   writes docs/layouts-from-transformers.md
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from holdfast.errors import InvalidError
from holdfast.integrations.transformers import layout_of

PAGE = Path(__file__).parents[3] / "docs" / "layouts-from-transformers.md"

STEPS = ("stack", "join", "sections", "interleave", "permute")

HEAD = """# Layouts compiled from Transformers

Transformers keeps a mapping for model types whose files differ from the model in memory. `holdfast layouts
--from-transformers MODEL_TYPE` writes the same mapping as a rule file of the [layout language](layout-language.md). The
file is data: a load through the file needs no Transformers.

The compiler makes the model of the type's default config without memory for tensors, and reads the rules off the names.
Then the rules are applied to every name and shape of that model, in both directions. A type whose rules make other
names or shapes than the mapping is refused. Names in files are those that `save_pretrained` writes. A config with
other parts than the default one may need more rules.
"""


def mapped_types() -> list[str]:
    """Return the model types that Transformers has a mapping for, by type or by class."""
    types = set()
    for key in conversion_mapping._build_checkpoint_conversion_mapping():
        config = getattr(getattr(transformers, key, None), "config_class", None)
        found = key if key in CONFIG_MAPPING_NAMES else getattr(config, "model_type", "")
        types |= {found} & {*CONFIG_MAPPING_NAMES}
    return sorted(types)


def class_named(config: Any, name: str) -> Any:
    """Return a model class that Transformers does not export."""
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    return getattr(module, name)


def compiled_types() -> tuple[dict[str, str], dict[str, str]]:
    """Return the rule file of each compiled type, and the reason of each refused one."""
    compiled, refused = {}, {}
    for each in mapped_types():
        try:
            compiled[each] = layout_of(each)
        except InvalidError as error:
            refused[each] = str(error).removeprefix(f"model type {each!r}: ").partition(". Write a rule file")[0]
    return compiled, refused


def page(compiled: Mapping[str, str], refused: Mapping[str, str]) -> str:
    """Return the page of the docs."""
    by_steps: dict[str, list[str]] = defaultdict(list)
    for name, text in compiled.items():
        steps = [step for step in STEPS if f"{step} = " in text]
        names_alone = "other names" if text.count("[[rule]]") > 1 else "none: every name stays"
        by_steps[", ".join(f"`{step}`" for step in steps) or names_alone].append(name)
    count = len(compiled) + len(refused)
    lines = [
        HEAD,
        f"Transformers {transformers.__version__}: {len(compiled)} of {count} model types are compiled "
        f"({len(compiled) / count:.0%}).\n",
        "| Steps | Types | Compiled |\n|-|-|-|",
    ]
    for steps, names in sorted(by_steps.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {steps} | {len(names)} | {', '.join(names)} |")
    lines.append("\n| Refused | Reason |\n|-|-|")
    lines += [f"| {name} | {reason.rstrip('.').replace('|', ' ')} |" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = page(*compiled_types())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    print(text)
