"""One entry in the table of switches is enough: all that deals with switches reads it from there."""

from settings.switch_table import SWITCHES, Situation, switch_of

def test_the_default_of_a_switch_follows_from_the_situation():
    assert [switch_of('channels_last').default_in(Situation(on_gpu, 1, False)) for on_gpu in (True, False)] == [True,
                                                                                                                False]
    blocks = switch_of('compile_blocks')
    assert blocks.default_in(Situation(True, 8, True)) is True
    assert not any(blocks.default_in(Situation(True, devices, mode))
                   for devices, mode in ((1, True), (None, True), (8, False), (8, 'reduce-overhead')))


def test_a_value_of_several_parts_needs_what_any_of_them_needs():
    attention = switch_of('attention')
    assert [value.cudnn for value in attention.values_in('flash,cudnn')] == [91501, None]
    assert attention.values_in('xformers')[0].package == 'xformers'


def test_every_default_is_a_value_of_its_switch():
    for switch in SWITCHES:
        if not callable(switch.default) and not switch.is_on_or_off:
            assert switch.default is False or switch.default in switch.names
