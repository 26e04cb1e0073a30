"""Arithmetic of a layout: integers, sizes, `+ - * // %`, comparisons and parentheses."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import InvalidError

NUMBER_MAX = 1 << 62
"""Largest magnitude of a number."""

_CHARACTERS_MAX = 256
_EXPECTED = "expected integers, sizes, + - * // %, comparisons and parentheses"

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression, parsed once."""

    text: str
    """The expression as written."""

    _root: ast.expr = field(repr=False, compare=False)

    def value(self, size: Callable[[str], int], where: str) -> int:
        """Return the value.

        Args:
            size: Returns a size by name.
            where: Layout and rule, for messages.
        Raises:
            InvalidError: A division has a remainder, or a number is too large.
        """
        return _value(self._root, size, f"{where}: {self.text}")


def expression_of(written: int | str, where: str) -> Expression:
    """Return an expression.

    Raises:
        InvalidError: The text is no expression.
    """
    text = str(written)
    if len(text) > _CHARACTERS_MAX:
        raise InvalidError(f"{where}: an expression of {len(text)} characters; expected at most {_CHARACTERS_MAX}")
    try:
        root = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidError(f"{where}: {text!r}: no expression; {_EXPECTED}") from error
    for node in ast.walk(root):
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        known = (ast.BinOp, ast.Compare, ast.Name, ast.Load, *_OPERATORS)
        if not is_number and not isinstance(node, known):
            raise InvalidError(f"{where}: {text!r}: {type(node).__name__}; {_EXPECTED}")
    return Expression(text, root)


def _value(node: ast.AST, size: Callable[[str], int], where: str) -> int:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        found = node.value
    elif isinstance(node, ast.Name):
        found = size(node.id)
    elif isinstance(node, ast.Compare):
        values = [_value(each, size, where) for each in (node.left, *node.comparators)]
        signs = [_OPERATORS[type(sign)] for sign in node.ops]
        found = int(all(sign(a, b) for sign, a, b in zip(signs, values[:-1], values[1:], strict=True)))
    else:
        assert isinstance(node, ast.BinOp)
        left, right = _value(node.left, size, where), _value(node.right, size, where)
        divides = isinstance(node.op, ast.FloorDiv | ast.Mod)
        if divides and (not right or (isinstance(node.op, ast.FloorDiv) and left % right)):
            rest = f"leaves a remainder of {left % right}" if right else "divides by zero"
            raise InvalidError(f"{where}: {left} // {right} {rest}; expected a whole number. Correct the sizes")
        found = _OPERATORS[type(node.op)](left, right)
    if abs(found) > NUMBER_MAX:
        raise InvalidError(f"{where}: {found:.3e}; expected at most 2**62")
    return found
