"""Numbers as text, the same in tables, messages and pages."""


def number(value: float | None, digits: int = 4) -> str:
    """Format `value` with `digits` significant digits: 0.4321, 1,234; "–" for None.

    Values from one thousand to one billion are written without decimals and with separators.
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def with_interval(value: float | None, low: float | None, high: float | None, digits: int = 4) -> str:
    """Format a value with its interval, if it has one: 20.1 [19.1, 21.1]."""
    if low is None or high is None:
        return number(value, digits)
    return f"{number(value, digits)} [{number(low, digits)}, {number(high, digits)}]"
