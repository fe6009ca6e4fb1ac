"""The type checker of the suite: shapes and types of arrays in every call of the package, with ints as floats."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
