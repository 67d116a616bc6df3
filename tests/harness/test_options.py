"""Flags, and the help that explains them."""
from harness.options import benchmark_parser


def test_every_flag_has_a_help_line():
    assert all(action.help for action in benchmark_parser('')._actions)
