"""A test or validation split of SOURCE is never mixed into the training data without a word."""
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import convert
from sdbench.datasets.names import KEYWORDS, group_by_split
from tests.runs import one_error_line
from tests.samples import files_of_samples, read_back, shaded, skipped_kinds, write_files, write_parquet, write_tar

SPLITS = {'train': 3, 'validation': 2, 'test': 1}  # number of samples


def write_splits(folder: Path, layout: str) -> None:
    """Write the samples of all splits, as Parquet files or as folders of images. Each caption names its split."""
    for split, count in SPLITS.items():
        images = [shaded(index) for index in range(count)]
        if layout == 'parquet':
            write_parquet(folder / f'data/{split}-00000-of-00001.parquet', {'image': images, 'text': [split] * count})
        else:
            samples = [{'jpg': image, 'caption': split} for image in images]
            write_files(folder / 'images' / split.title(), files_of_samples(samples))


@pytest.mark.parametrize('layout', ['parquet', 'folders'])
def test_a_split_must_be_chosen_and_the_others_are_logged(tmp_path, capsys, layout):
    write_splits(tmp_path / 'in', layout)
    line = one_error_line(['in', 'out'], capsys, convert.main)
    for words in ('train (such as ', 'validation (such as ', 'test (such as ', '--split train', '--split all'):
        assert words in line
    assert not (tmp_path / 'out').exists()
    for split, count in SPLITS.items():
        assert convert.main(['in', split, '--split', split]) == 0
        assert [text for _, text in read_back(split)] == [split] * count
        assert {kind for _, _, kind in skipped_kinds(split)} == {'other split'}
    assert convert.main(['in', 'out', '--split', 'all']) == 0
    assert len(read_back('out')) == 6
    assert not (tmp_path / 'out/skipped.jsonl').exists()


def test_only_the_names_from_a_source_on_count():
    paths = ['/home/tests/test/photos/a.jpg', 's3://bucket/tars/0.tar', '/home/tests/test/more/1/b.jpg']
    sources = ['/home/tests/test/photos', 's3://bucket/tars', '/home/tests/test/m*']
    assert list(group_by_split(paths, sources)) == ['train']
    assert list(group_by_split(['/x/train/a.jpg', '/x/test/b.jpg'], ['/x/train', '/x/test'])) == ['train', 'test']


def test_a_source_of_one_split_needs_no_flag(tmp_path, capsys):
    write_splits(tmp_path / 'in', 'folders')
    assert convert.main(['in/images/Test', 'out']) == 0
    assert [text for _, text in read_back('out')] == ['test']
    line = one_error_line(['in/images/Validation', 'other', '--split', 'test'], capsys, convert.main)
    assert '--split test: SOURCE holds only files of train' in line


@pytest.mark.parametrize('is_row', [False, True])  # whether the file consists of two tars in a row
def test_a_tar_with_several_splits_is_refused_and_the_same_out_takes_the_flag(capsys, is_row):
    train, val = ({f'{split}/0.jpg': shaded(1), f'{split}/0.txt': split.encode()} for split in ('train', 'val'))
    write_tar('in/0.tar', {'0.jpg': shaded(0), '0.txt': b'0'})
    if is_row:
        write_files('in', {'1.tar': write_tar('a.tar', train).read_bytes() + write_tar('b.tar', val).read_bytes()})
    else:
        write_tar('in/1.tar', train | val)
    argv = ['in', 'out', '--num_workers', '1', '--size_limit', '1kb']
    line = one_error_line(argv, capsys, convert.main)
    assert '1.tar holds several splits of a dataset: 1 of train (such as train/0), 1 of validation' in line
    assert convert.main([*argv, '--split', 'all']) == 0
    assert [text for _, text in read_back('out')] == ['0', 'train', 'val']


SEPARATORS = '-._ 0123456789'
NO_WORDS = st.text(st.sampled_from('bcf/'), min_size=1)


@given(st.sampled_from([(keyword, split) for split, keywords in KEYWORDS.items() for keyword in keywords]),
       st.sampled_from(['', *SEPARATORS]), st.sampled_from(['', *SEPARATORS]), NO_WORDS)
def test_a_keyword_between_separators_in_a_folder_or_a_file_names_the_split(keyword, before, after, text):
    word, split = keyword
    for name in (f'x/{text}{before}{word.upper()}{after}/a.jpg', f'x/{before}{word}{after}.jpg'):
        is_word = text.endswith('/') or before or 'a.jpg' not in name
        assert list(group_by_split([name, 'y/b.jpg'])) == sorted({split, 'train'} if is_word else {'train'},
                                                                  key=list(KEYWORDS).index)
        assert list(group_by_split([f'{word}/{name}', f'{word}/a.jpg'])) == list(group_by_split([name, 'a.jpg']))


@pytest.mark.parametrize('names', [['attest/a.jpg', 'contest.jpg', 'b.jpg'], ['train-01.jpg', 'bus-01.jpg'],
                                   ['trainval/a.jpg', 'valley/b.jpg', 'devil.jpg'], ['/test/a.jpg', '/test/b.jpg']])
def test_other_words_and_pictures_of_trains_are_no_split(names):
    assert list(group_by_split(names)) == ['train']
