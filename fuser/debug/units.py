"""Numbers with their units, in the form that reports print."""


def bytes_text(n: int) -> str:
    """A number of bytes with the largest unit below it, up to GiB: "512 B", "1.5 MiB"."""
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"
