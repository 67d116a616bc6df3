"""Claims about setups: flags and the record of a run with these flags have the same setup."""
from hypothesis import given, settings
from hypothesis import strategies as st

import sdbench.records.record
from sdbench.flags.train import ENCODERS, Run, Train
from sdbench.setup import Setup, settings_of_setup, setup_of_record, setup_of_settings

any_settings = st.builds(
    Run, encoders=st.sampled_from(list(ENCODERS.values())), num_devices=st.just(1), batches_per_epoch=st.just(9),
    sample_folder=st.just('samples'), by_default=st.just(()),
    device_train_microbatch_size=st.sampled_from(['auto', 4]), precision=st.sampled_from(['amp_bf16', 'fp32']),
    encoder_precision=st.sampled_from(['bf16', 'fp32']), compile=st.sampled_from([False, True, 'reduce-overhead']),
    channels_last=st.booleans(), compile_blocks=st.booleans(), attention=st.sampled_from(['sdpa', 'math']),
    gradient_checkpointing=st.booleans(), use_ema=st.booleans(), image_size=st.sampled_from([256, 512]),
    network_gbits=st.sampled_from([None, 100.0]), ema_start=st.sampled_from([None, '5ba']),
    clip_grad_norm=st.sampled_from([None, 1.0]), use_synth_data=st.booleans())


@settings(max_examples=50, deadline=None)
@given(any_settings)
def test_a_record_has_the_setup_of_the_flags_of_its_run(given):
    record = sdbench.records.record.make_record('train', given, {'status': 'complete'})
    found = setup_of_record(record)
    assert found.device == record['device']
    assert Setup(**vars(found) | {'device': None}) == setup_of_settings(given)

    # A record of an older version lacks flags that have had their default.
    defaults = vars(Train())
    older = {key: value for key, value in record.items()
             if key not in defaults or value != defaults[key] or key == 'device_train_microbatch_size'}
    assert setup_of_record(older) == found


@settings(max_examples=50, deadline=None)
@given(any_settings)
def test_settings_and_setups_are_turned_into_each_other(given):
    setup = setup_of_settings(given).with_defaults()
    assert setup_of_settings(settings_of_setup(setup)).with_defaults() == setup
    assert setup.with_defaults() == setup


def test_what_a_hand_written_record_does_not_state_is_not_known():
    record = {'device': 'NVIDIA H100 80GB HBM3', 'num_devices': 16, 'image_size': 512, 'images_per_sec': 800.0}
    assert setup_of_record(record) == Setup(device='NVIDIA H100 80GB HBM3', num_devices=16, image_size=512)
    assert setup_of_record(record).machines == 2
    assert setup_of_record(record | {'num_nodes': 4}).gpus_per_node == 4
