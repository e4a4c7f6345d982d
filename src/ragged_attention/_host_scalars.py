"""Host scalars: Python numbers, NumPy scalars, and one-element arrays in host memory.

The source documents of both operations have the last; see their pages in docs/.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

_LONGEST_TEXT = 80  # characters of a string that a message repeats


def _host_value(value: Any, name: str, expected: str) -> Any:
    """The element of a one-element host array; anything that is no array as it is."""
    if not hasattr(value, "__dlpack_device__"):
        return value
    try:  # whatever an object makes of the protocol
        kind = int(value.__dlpack_device__()[0])
        on_host = kind in (1, 3)  # kDLCPU, kDLCUDAHost
        array = value if isinstance(value, np.ndarray) or not on_host else np.from_dlpack(value)
    except Exception as error:
        raise TypeError(
            f"{name}: expected {expected}, got a {type(value).__name__} that DLPack cannot read: {reason_of(error)}"
        ) from error
    if not on_host:
        raise TypeError(
            f"{name}: expected {expected} on the host, got a {type(value).__name__} in device memory, and reading it "
            f"would synchronise; pass value.item()"
        )
    if array.size != 1:
        raise TypeError(f"{name}: expected {expected}, got an array of shape {list(array.shape)}")
    return array.reshape(())[()]


def host_int(value: Any, name: str) -> int:
    number = value if type(value) is int else _host_int(value, name)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected a 64-bit integer, got {described(number)}")
    return number


def _host_int(value: Any, name: str) -> int:
    expected = "an integer or a one-element integer array"
    scalar = _host_value(value, name, expected)
    try:
        if isinstance(scalar, (bool, np.bool_)):
            raise TypeError
        return operator.index(scalar)
    except TypeError:
        raise TypeError(f"{name}: expected {expected}, got {described(value)}") from None


def host_bool(value: Any, name: str) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {described(value)}")


def host_int_or_none(value: Any, name: str) -> int | None:
    return None if value is None else host_int(value, name)


def host_float_or_none(value: Any, name: str) -> float | None:
    if value is None or type(value) is float:
        return value
    expected = "a number or a one-element array"
    scalar = _host_value(value, name, expected)
    try:
        if isinstance(scalar, (bool, np.bool_, str, bytes, np.complexfloating)):
            raise TypeError
        return float(scalar)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got {described(value)}") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected {expected}, got {described(value)}") from None


def described(value: Any) -> str:
    """What an error message says was given: short whatever it is, and of no tensor the values.

    Reading a tensor's values could synchronise a device; an integer of thousands of digits has no decimal text.
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (bool, int, float, complex)) or value is None:
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]!r}..."
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ + (f" of {dtype}" if dtype is not None else "")


def reason_of(error: Exception) -> str:
    """An exception of somebody else's code as a message repeats it: its class and words, in short."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return type(error).__name__ + (f": {text[:200]}" if text else "")
