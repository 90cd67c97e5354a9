import typing

from scaling_slurm.cli import options


def test_every_shared_option_has_a_help_text():
    found = {name: value for name, value in vars(options).items() if typing.get_origin(value) is typing.Annotated}
    assert len(found) >= 12
    assert all(typing.get_args(value)[1].help for value in found.values())
