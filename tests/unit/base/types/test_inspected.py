"""Types are inspected before threads convert values to them at the same time."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, types
import msgspec
from holdfast.base.types.inspected import inspected

CLASSES = "".join(
    f"@dataclasses.dataclass(slots=True)\\nclass Inner{number}:\\n    value: int = 0\\n" for number in range(20)
)
FIELDS = "".join(f"    field{number}: Inner{number} | None = None\\n" for number in range(20))
SOURCE = (
    "from __future__ import annotations\\nimport dataclasses\\n"
    f"{CLASSES}@dataclasses.dataclass(slots=True)\\nclass Outer:\\n{FIELDS}"
)
sys.setswitchinterval(1e-6)
for number in range(50):
    module = types.ModuleType(f"message{number}")
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    together = threading.Barrier(4)

    def convert(kind):
        together.wait()
        msgspec.convert({"field19": {"value": 5}}, inspected(kind, msgspec.msgpack.Decoder))

    threads = [threading.Thread(target=convert, args=(module.Outer,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_convert_to_a_type_for_the_first_time_together() -> None:
    # A process of its own: without the inspection it dies by a segmentation fault.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
