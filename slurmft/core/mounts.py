"""The kernel's table of mounted file systems."""

_TABLE = "/proc/self/mountinfo"


def lines() -> list[str]:
    """Returns the lines of the table; their fields are in proc(5).

    Names are as users have given them, in any bytes: the kernel escapes spaces, tabs, line feeds
    and backslashes. So a line ends with a line feed, and with nothing else that Python takes for an
    end of one.
    """
    with open(_TABLE, "rb") as file:
        text = file.read().decode("utf-8", "surrogateescape")
    return text.rstrip("\n").split("\n")
