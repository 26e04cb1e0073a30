"""What the demo proves, gathered line by line, and the table it ends with."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash


class Proofs:
    """Claims and whether they held."""

    def __init__(self) -> None:
        self._lines: list[tuple[bool, str, str]] = []

    def claim(self, claim: str, held: bool, evidence: str) -> None:
        """Record whether a claim held, and what speaks for it or against it."""
        self._lines.append((held, claim, evidence))

    def same_tensors(self, claim: str, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
        """Record whether two sets of digests by tensor name are equal and not empty."""
        differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        held = bool(expected) and not differing
        evidence = f"digest of all {combined(found)}" if held else f"{len(differing)} differ, first {differing[:3]}"
        self.claim(f"{claim}: {len(expected)} tensors bit-identical", held, evidence)

    def same_values(self, claim: str, expected: object, found: object) -> None:
        """Record whether plain values are equal."""
        held = expected == found
        evidence = "step, run, scheduler, optimizer groups" if held else f"expected {expected}, found {found}"
        self.claim(f"{claim}: plain values equal", held, evidence)

    def same_losses(self, claim: str, expected: Mapping[int, str], found: Mapping[int, str], steps: range) -> None:
        """Record whether two loss curves are equal bit for bit over `steps`."""
        differing = [step for step in steps if expected.get(step) is None or expected.get(step) != found.get(step)]
        held = len(steps) > 0 and not differing
        evidence = f"last {float.fromhex(found[steps[-1]]):.6f}" if held else f"steps {differing} differ"
        self.claim(f"{claim}: losses of steps {steps[0]}-{steps[-1]} bit-identical", held, evidence)

    def show(self) -> bool:
        """Print the table; return whether everything held."""
        width = max(len(claim) for _, claim, _ in self._lines)
        for held, claim, evidence in self._lines:
            print(f"  {'✓' if held else '✗'} {claim:<{width}}  {evidence}")
        return all(held for held, _, _ in self._lines)


def combined(digests: Mapping[str, str]) -> str:
    """Return one digest over tensors by name."""
    return xxhash.xxh3_128_hexdigest("".join(f"{name}={digests[name]}\n" for name in sorted(digests)).encode())[:16]
