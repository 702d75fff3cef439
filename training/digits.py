"""Sums worked out digit by digit, in words the model can repeat. Every function returns (thought, result)."""

from __future__ import annotations


def spaced(text: str) -> str:
    return " ".join(text)


def add(a: int, b: int) -> tuple[str, int]:
    width = max(len(str(a)), len(str(b)))
    above, below = str(a).zfill(width)[::-1], str(b).zfill(width)[::-1]
    lines = [f"{a}+{b}, from the right: {spaced(above)} and {spaced(below)}"]
    digits, carry = "", 0
    for x, y in zip(above, below, strict=True):
        total = int(x) + int(y) + carry
        lines.append(_column(f"{x}+{y}" + ("+1" if carry else ""), total, total % 10, "carry 1" if total > 9 else ""))
        digits, carry = digits + str(total % 10), total // 10
    digits += "1" if carry else ""
    return "\n".join(lines) + _assembled(digits, a + b), a + b


def subtract(a: int, b: int) -> tuple[str, int]:
    order, bigger = compare(a, b)
    if a == b:
        return f"{order}\n{a}-{b}=0", 0
    if bigger == a:
        columns, result = _subtract_columns(a, b)
        return f"{order}\n{columns}", result
    columns, result = _subtract_columns(b, a)
    return f"{order} The result is negative.\n{columns}\n{a}-{b}=-{result}", -result


def _subtract_columns(a: int, b: int) -> tuple[str, int]:
    above, below = str(a)[::-1], str(b).zfill(len(str(a)))[::-1]
    lines = [f"{a}-{b}, from the right: {spaced(above)} and {spaced(below)}"]
    digits, borrow = "", 0
    for x, y in zip(above, below, strict=True):
        rest = int(x) - int(y) - borrow
        lines.append(_column(f"{x}-{y}" + ("-1" if borrow else ""), rest, rest % 10, "borrow 1" if rest < 0 else ""))
        digits, borrow = digits + str(rest % 10), int(rest < 0)
    return "\n".join(lines) + _assembled(digits, a - b), a - b


def _column(sum_text: str, value: int, digit: int, passed: str) -> str:
    return f"{sum_text}={value}: {digit}" + (f", {passed}" if passed else "")


def _assembled(digits: str, result: int) -> str:
    return f"\nDigits: {spaced(digits)}. Turned round: {result}"


def compare(a: int, b: int) -> tuple[str, int]:
    """The thought that finds the greater number, and that number."""
    if a == b:
        return f"{a} and {b} are equal.", a
    if len(str(a)) != len(str(b)):
        more = max(a, b)
        return f"{a} has {len(str(a))} digits, {b} has {len(str(b))}: {more} is greater.", more
    steps = []
    for x, y in zip(str(a), str(b), strict=True):
        steps.append(f"{x}{'=' if x == y else '>' if x > y else '<'}{y}")
        if x != y:
            break
    return f"{a} and {b}: {', '.join(steps)}: {max(a, b)} is greater.", max(a, b)


def multiply(a: int, b: int) -> tuple[str, int]:
    """Partial products, one for each digit of b, then their sum."""
    rows, products = [], []
    for place, digit in enumerate(reversed(str(b))):
        row, product = _times_digit(a, int(digit))
        product *= 10**place
        rows.append(row + (f", so {a}×{digit}{'0' * place}={product}" if place else ""))
        products.append(product)
    total = products[0]
    for product in products[1:]:
        thought, total = add(total, product)
        rows.append(thought)
    return "\n".join([f"{a}×{b}, digits of {b} from the right: {spaced(str(b)[::-1])}", *rows]), a * b


def _times_digit(a: int, digit: int) -> tuple[str, int]:
    if digit < 2 or a < 2:
        return f"{a}×{digit}={a * digit}", a * digit
    steps, digits, carry = [], "", 0
    for x in reversed(str(a)):
        value = int(x) * digit + carry
        steps.append(f"{x}×{digit}" + (f"+{carry}" if carry else "") + f"={value}")
        digits, carry = digits + str(value % 10), value // 10
    digits += str(carry) if carry else ""
    return f"{a}×{digit}: {', '.join(steps)}. Digits: {spaced(digits)}. Turned round: {a * digit}", a * digit


def divide(a: int, b: int) -> tuple[str, tuple[int, int]]:
    """Long division of a by one digit (or a small number) b."""
    lines, digits, rest = [f"{a}÷{b}, digit by digit: {spaced(str(a))}"], "", 0
    for x in str(a):
        value = rest * 10 + int(x)
        quotient, left = divmod(value, b)
        lines.append(f"{value}÷{b}={quotient}, {quotient}×{b}={quotient * b}, {value}-{quotient * b}={left}")
        digits, rest = digits + str(quotient), left
    return "\n".join(lines) + f"\nDigits: {spaced(digits)}: {a // b}, rest {rest}", divmod(a, b)
