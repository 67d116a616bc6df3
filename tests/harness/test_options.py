"""Flags, and the help that explains them."""
import pytest

from harness.options import benchmark_parser


def test_every_flag_has_a_help_line_with_its_default_in_a_group_of_its_subject():
    parser = benchmark_parser('')
    for action in parser._actions[1:]:  # the first is --help
        assert 'default' in action.help, action.dest
    grouped = [action for group in parser.groups.values() for action in group._group_actions]
    assert grouped and {id(action) for action in grouped} == {id(action) for action in parser._actions[1:]}


@pytest.mark.parametrize('argv, value', [
    ([], False), (['--compile'], True), (['--compile', '--use_ema'], True), (['--compile', '--no-compile'], False),
    (['--no-compile', '--compile'], True), (['--compile', 'reduce-overhead'], 'reduce-overhead')])
def test_compiling_takes_a_mode_or_none(argv, value):
    assert benchmark_parser('').parse_args(argv).compile == value
