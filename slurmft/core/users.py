"""Users and groups in words."""

import grp
import os
import pwd


def is_private_group(group: int) -> bool:
    """Returns whether a group is this user's alone: many systems make one for each user, with a
    umask that lets it write."""
    try:
        user = pwd.getpwuid(os.geteuid())
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    is_of_user = group == user.pw_gid and entry.gr_name == user.pw_name
    return is_of_user and set(entry.gr_mem) <= {user.pw_name}


def group_name(number: int) -> str:
    """Returns the name of a group by the number; "1000" where it has no name."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def user_name(number: int) -> str:
    """Returns the name of a user by the number; "user 1000" where it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def owner(number: int) -> str:
    """Returns a user in words, by the number: "eve (uid 1002)"."""
    name = user_name(number)
    if name.endswith(f" {number}"):
        return f"another user (uid {number})"
    return f"{name} (uid {number})"
