"""Image-caption batches for the benchmark, synthetic or streamed from MDS shards.

A batch is `image` uint8 (B, 3, H, H), or `moments` float16 (B, 8, H/8, H/8) as encode.py stores them, and `caption`
int64 (B, 77). Images travel as bytes at the size they were stored in; `normalize` brings a microbatch to the training
size and to [-1, 1] once it is on the device.
"""
import os
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, partial

import numpy as np
import torch
from composer import Evaluator
from composer.core import DataSpec
from composer.utils import dist
from diffusers import DDPMScheduler
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_pil_image

from sdbench.errors import BadSample, DataError, UserError, unreadable_shard
from sdbench.flags.train import SD2_BASE, Train
from sdbench.inputs.batches import (
    NOISE,
    TIMESTEP,
    BadSamples,
    bad_sample_line,
    collate,
    decode_sample,
    normalize,
)
from sdbench.inputs.captions import CAPTIONS, draw_caption, require_names
from sdbench.inputs.images import decode_image, decode_whole_image, resize
from sdbench.inputs.loader import (
    BATCHES_PER_WORKER,
    CountedCollate,
    TimedDataLoader,
    TimedStreamingDataLoader,
    begin_worker,
)
from sdbench.inputs.shards import (
    MOMENTS,
    hash_of_images,
    number_of_samples,
    read_index,
    require_same_origin,
)
from sdbench.inputs.stream import DOWNLOADS, VerifiedDataset, VerifiedStream, is_readable_in_place
from sdbench.inputs.tokenizer import CAPTION_LENGTH, CLIP_VOCABULARY, build_tokenizer
from sdbench.models.loading import ModelFiles, build_fitting_tokenizer
from sdbench.paths import INDEX

DIFFERENT_SAMPLES = 16  # of the synthetic ones, for a loader that collates them by itself
EVALUATION_SEED = 17  # whatever --seed is, so that the losses of trainings with different seeds compare
MOST_STAND_INS = 1000  # samples that may be bad in a row


class SyntheticImageCaptionDataset(Dataset):
    """Random images or latents with captions, drawn once: `collate` gives the same tensors for every batch, at no cost.

    Args:
        image_size: height and width of the images, in pixels.
        caption_length: token ids of a caption.
        num_samples: length of an epoch, over all ranks.
        vocab_size: token ids are drawn from 0 to vocab_size - 1.
        seed: of the draw; give each rank its own.
        latent_size: height and width L of latents, to give the VAE's `moments` float16 (8, L, L) instead of images.
    """

    def __init__(self, image_size: int = 512, caption_length: int = CAPTION_LENGTH, num_samples: int = 100_000, *,
                 vocab_size: int = CLIP_VOCABULARY, seed: int = 17,
                 latent_size: int | None = None):
        self.image_size = image_size
        self.caption_length = caption_length
        self.num_samples = num_samples
        self.vocab_size = vocab_size
        self.seed = seed
        self.latent_size = latent_size
        self.latents = latent_size is not None
        self.samples = self.random_batch(DIFFERENT_SAMPLES)
        self.batch = None  # the newest, which is given again where the next is as large

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample: `image` uint8 (3, H, H) or `moments`, and `caption` int64 (77,)."""
        return {name: tensor[index % DIFFERENT_SAMPLES] for name, tensor in self.samples.items()}

    def collate(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        """Return the batch of as many samples: `image` uint8 (B, 3, H, H) or `moments`, and `caption` int64 (B, 77)."""
        if self.batch is None or len(self.batch['caption']) != len(samples):
            self.batch = self.random_batch(len(samples))
            if torch.cuda.is_available():  # once: DataLoader(pin_memory=True) would copy every batch
                self.batch = {name: tensor.pin_memory() for name, tensor in self.batch.items()}
        return dict(self.batch)

    def random_batch(self, number: int) -> dict[str, torch.Tensor]:
        """Make a batch of `number` random samples, the same each time."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.latents:
            moments = torch.randn(number, 8, self.latent_size, self.latent_size, generator=generator)
            batch = {MOMENTS: moments.half()}
        else:
            size = (number, 3, self.image_size, self.image_size)
            batch = {'image': torch.randint(256, size, dtype=torch.uint8, generator=generator)}
        batch['caption'] = torch.randint(self.vocab_size, (number, self.caption_length), generator=generator)
        return batch


class StreamingLAIONDataset(VerifiedDataset):
    """Samples of MDS shards with the columns `jpg` (bytes) and `caption` (str), or encode.py's `moments` for `jpg`.

    What is random of a sample, which of several captions it has, whether that is dropped and the image mirrored,
    follows from `shuffle_seed`, the epoch and its number. So a resumed run draws the same, on any number of ranks and
    of processes. `sample(number)` has all captions, and the first.

    A sample is what torch's own DataLoader collates; `build_loader`, which is faster, takes the captions as text.

    Args:
        remote: folder or object store with the shards. A local folder is read where it is, unless `local` is given.
        local: folder in which the shards are cached, in a folder for each dataset; default: one below the folder for
            temporary files. Without a remote it is read where it is.
        split: subfolder of both.
        shuffle: whether each epoch has an order of its own.
        tokenizer_name_or_path: folder or hub name; the default is CLIP's own vocabulary, which is at hand.
        transform: called with each image, a PIL.Image in RGB as it is stored; its result is the sample's `image`.
        predownload: samples to fetch ahead; default: Streaming's own, a few batches.
        download_retry: tries of each request to a store, up to 1, 2, 4, 8, 16, then 20 seconds apart, by chance.
        download_timeout: seconds without a byte, after which a request is tried again.
        batch_size: samples a device.
        image_size: without a transform, larger images are reduced to this many pixels a side.
        index: the index.json of `remote`, if it was read already.
        cache_limit: bytes, or a text such as 500gb, that the copies may take: the oldest are dropped.
        caption_weights: of the captions of each name; default: all captions of an image have the same chance.
        caption_drop: probability that the empty caption takes the place of a sample's, for classifier-free guidance: so
            the model also learns to draw without a caption (Ho and Salimans 2022).
        random_flip: whether half of the images are mirrored.
        kwargs: more for `streaming.StreamingDataset`.

    Raises UserError if an argument is not one that these shards can have.
    """
    def __init__(self, remote: str | None = None, local: str | None = None, split: str | None = None,
                 shuffle: bool = False, tokenizer_name_or_path: str = SD2_BASE, transform: Callable | None = None,
                 predownload: int | None = None, download_retry: int = DOWNLOADS, download_timeout: float = 60,
                 batch_size: int | None = None, *, image_size: int = 512, index: dict | None = None,
                 cache_limit: int | str | None = None, caption_weights: Mapping[str, float] | None = None,
                 caption_drop: float = 0.0, random_flip: bool = False, **kwargs):
        if remote is None and local is None:
            raise UserError('StreamingLAIONDataset needs a remote, or a local folder with shards')
        self.image_size = image_size
        self.transform = transform

        # captions as token ids
        self.gives_text = False  # which a loader tokenizes, batch by batch
        if tokenizer_name_or_path != SD2_BASE:
            self.tokenizer = build_tokenizer(tokenizer_name_or_path)

        # the shards
        if split:
            remote = remote and os.path.join(remote, split)
            local = local and os.path.join(local, split)
        if index is None:
            index = read_index(remote or local, '--remote' if remote else '--local')
        self.latents = 'latents' in index
        if (transform or random_flip) and self.latents:
            raise UserError('these shards hold latents, which take no transform and no random_flip; leave it out, or '
                            'read the images')
        self.caption_drop = caption_drop
        self.random_flip = random_flip
        self.caption_weights = caption_weights or {}
        require_names(self.caption_weights, index, '--caption_weights', remote or local)
        self.index = index
        stream = VerifiedStream(index, remote, local, cache_limit, download_retry, download_timeout)
        super().__init__(stream, shuffle=shuffle, predownload=predownload, batch_size=batch_size, **kwargs)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Build CLIP's own tokenizer, where none was given, when it is first needed."""
        return build_tokenizer()

    def __getitem__(self, index: int) -> dict:
        """Return sample `index`, or where it is bad the next good one, with tensors for torch's own collate function.

        `image` uint8 (3, image_size, image_size), or what the transform makes, or `moments` float16 (8, H/8, H/8), and
        `caption` int64 (77,), of the caption that is drawn. Where it gives text, it is that of `good_sample`.
        """
        sample = self.good_sample(index)

        # what is random
        epoch = max(0, self.next_epoch - 1)  # before an iteration, that of the first
        sample['caption'] = draw_caption(sample.pop(CAPTIONS), self.caption_weights, self.shuffle_seed, epoch, index)
        for_drop, for_flip = np.random.default_rng((self.shuffle_seed, epoch, index)).random(2)
        if for_drop < self.caption_drop:
            sample['caption'] = ''
        if self.random_flip and for_flip < 0.5:
            sample['image'] = sample['image'].flip(-1)

        # as text for our loader, or with all that torch's own takes
        if self.gives_text:
            return sample
        for number, reason in sample.pop('bad'):
            print(bad_sample_line(number, reason), file=sys.stderr)
        if self.transform:
            sample['image'] = self.transform(to_pil_image(sample['image']))
        elif not self.latents:
            sample['image'] = resize(sample['image'], self.image_size)  # torch stacks images of one size alone
        return sample | {'caption': torch.tensor(self.tokenizer.encode(sample['caption']).ids)}

    def good_sample(self, index: int) -> dict:
        """Return sample `index` or the next good one, as `sample` does; `bad` has (index, reason) of others.

        Raises DataError if a shard cannot be had, or MOST_STAND_INS samples in a row are bad.
        """
        bad = []
        for candidate in range(index, index + MOST_STAND_INS):
            candidate = int(candidate % self.num_samples)
            try:
                return self.sample(candidate) | {'bad': bad}
            except BadSample as error:
                bad.append((candidate, str(error)))
        raise DataError(f'{len(bad):,} samples in a row are bad, the first, {bad[0][0]}: {bad[0][1]}')

    def sample(self, index: int) -> dict:
        """Return `image` uint8 (3, H, H) or `moments` float16 (8, H/8, H/8), the first `caption`, and all `captions`.

        Raises BadSample if the sample is bad, and DataError if its shard cannot be had or is not what index.json says.
        """
        # the columns of its shard
        try:
            columns = super().__getitem__(index)
        except DataError:
            raise
        except UnicodeDecodeError:
            raise BadSample('the caption is not UTF-8') from None
        except Exception as error:  # every storage client has its own
            raise unreadable_shard(error) from None

        # what they hold: for a transform all of an image
        decode = partial(decode_image, image_size=self.image_size)
        if self.transform:
            decode = decode_whole_image
        return decode_sample(columns, CAPTIONS in self.index, decode)


class HeldOutSamples(Dataset):
    """The samples of a dataset by index, each with a noise and a timestep that depend on its index and the seed alone.

    So the loss on them is the same on any number of ranks, in microbatches of any size, at any time of a training. A
    sample that does not decode is replaced by another.

    Args:
        samples: that are held out.
        latent_size: height and width of the latents that are trained on.
        num_timesteps: of the noise schedule.
        seed: of the noise and of the timesteps.
    """

    def __init__(self, samples: StreamingLAIONDataset, latent_size: int, num_timesteps: int, seed: int):
        self.samples = samples
        self.index = samples.index
        self.image_size = samples.image_size
        self.latent_size = latent_size
        self.num_timesteps = num_timesteps
        self.seed = seed

    def __len__(self) -> int:
        return self.samples.num_samples

    def __getitem__(self, index: int) -> dict:
        """Return a sample with its `noise`, float32 (8, H/8, W/8), and its `timestep`, int64 ()."""
        seeds = np.random.SeedSequence((self.seed, index))
        generator = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
        side = self.latent_size
        draws = {NOISE: torch.randn(8, side, side, generator=generator),
                 TIMESTEP: torch.randint(self.num_timesteps, (), generator=generator)}
        return self.samples.good_sample(index) | draws


def build_loader(dataset: Dataset, batch_size: int, num_workers: int, tokenizer: Tokenizer | None = None,
                 max_bad_samples: float = 0.01) -> DataSpec:
    """Build the loader of a dataset for Composer's Trainer.

    Every batch of a training is whole. An evaluation has each sample once, in order and shared by the ranks, and its
    last batch is smaller.

    Args:
        dataset: for a training, a SyntheticImageCaptionDataset or a StreamingLAIONDataset; for an evaluation,
            HeldOutSamples.
        batch_size: samples a device.
        num_workers: processes that decode, for each device; the synthetic dataset takes none.
        tokenizer: of the captions; default: that of a streamed dataset, which gives them as text from here on.
        max_bad_samples: the share that may be bad before the run ends.

    Raises UserError if the streamed dataset has a transform, since this loader scales images on the device.
    """
    if tokenizer is None and isinstance(dataset, StreamingLAIONDataset):
        tokenizer = dataset.tokenizer
    make_batch = partial(collate, tokenizer=tokenizer, image_size=dataset.image_size)
    workers = {'num_workers': num_workers, 'worker_init_fn': begin_worker,
               'pin_memory': torch.cuda.is_available()}

    # random data, held-out samples, or shards
    if isinstance(dataset, SyntheticImageCaptionDataset):
        sampler = dist.get_sampler(dataset, drop_last=True)
        loader = TimedDataLoader(dataset, batch_size, sampler=sampler, drop_last=True, collate_fn=dataset.collate)
    elif isinstance(dataset, HeldOutSamples):
        loader = DataLoader(dataset, batch_size, sampler=dist.get_sampler(dataset), collate_fn=make_batch, **workers)
    else:
        if dataset.transform:
            raise UserError('build_loader takes no dataset with a transform; use torch.utils.data.DataLoader')
        dataset.gives_text = True
        loader = TimedStreamingDataLoader(dataset, batch_size=batch_size, drop_last=True,
                                          collate_fn=CountedCollate(make_batch, num_workers),
                                          prefetch_factor=BATCHES_PER_WORKER if num_workers else None,
                                          persistent_workers=num_workers > 0, **workers)

    # what the training does with a batch, and on the device with a microbatch
    return DataSpec(loader, batch_transforms=BadSamples(max_bad_samples),
                    microbatch_transforms=partial(normalize, image_size=dataset.image_size))


def build_data(settings: Train, files: ModelFiles, index: dict | None) -> DataSpec:
    """Build the loader of --remote, which holds images or latents, or of synthetic data.

    Args:
        settings: of the run, complete.
        files: of the model.
        index: the index.json of --remote; None: synthetic data.

    Raises UserError if the latents or the tokenizer do not fit the model.
    """
    image_size = settings.image_size
    seed = settings.seed

    # synthetic data
    if index is None:
        latent_size = files.latent_size(image_size) if settings.latents else None
        samples = settings.batches_per_epoch * settings.batch_size
        dataset = SyntheticImageCaptionDataset(image_size, num_samples=samples, vocab_size=files.vocab_size,
                                               seed=seed + dist.get_global_rank(), latent_size=latent_size)
        return build_loader(dataset, settings.device_batch_size, num_workers=0)

    # what --remote holds
    if settings.latents:  # images are of no VAE, whose weights take seconds to hash
        require_same_origin(settings.remote, index, files.origin_of_latents(image_size))
    tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
    dataset = StreamingLAIONDataset(settings.remote, settings.local, image_size=image_size, index=index,
                                    cache_limit=settings.cache_limit, batch_size=settings.device_batch_size,
                                    epoch_size=settings.batches_per_epoch * settings.batch_size,
                                    caption_weights=dict(settings.caption_weights), caption_drop=settings.caption_drop,
                                    random_flip=settings.random_flip, shuffle=True, shuffle_seed=seed)
    return build_loader(dataset, settings.device_batch_size, settings.num_workers, tokenizer, settings.max_bad_samples)


def open_held_out(settings: Train, files: ModelFiles, trained_on: Dataset) -> HeldOutSamples | None:
    """Return the samples of --eval_remote; None without the flag.

    Raises UserError if they do not fit the model, or are those that the run trains on.

    Args:
        settings: of the run.
        files: of the model.
        trained_on: the dataset of the training; where it holds latents, the model has no VAE.
    """
    remote = settings.eval_remote
    if not remote:
        return None
    flag = '--eval_remote'

    # what it holds, and whether a model that is trained so can be evaluated on it
    index = read_index(remote, flag)
    if 'latents' in index:
        require_same_origin(remote, index, files.origin_of_latents(settings.image_size), flag)
    elif trained_on.latents:
        raise UserError(f'{flag} {remote} holds images, and the training is on latents, without a VAE; encode it, too')
    if settings.remote and hash_of_images(index) == hash_of_images(trained_on.index):
        raise UserError(f'{flag} {remote} is what the run trains on, --remote {settings.remote} by its {INDEX}; give '
                        'it shards of other samples')
    if number_of_samples(index) == 0:
        raise UserError(f'{flag} {remote} holds no samples')

    # its samples, each with its noise and timestep; the flags of caches hold for it as for the training
    is_cached = settings.local is not None or not is_readable_in_place(remote, index['shards'])
    images = StreamingLAIONDataset(remote, settings.local, image_size=settings.image_size, index=index, batch_size=1,
                                   cache_limit=settings.cache_limit if is_cached else None)
    timesteps = len(DDPMScheduler.from_config(files.configs['scheduler']))
    return HeldOutSamples(images, files.latent_size(settings.image_size), timesteps, EVALUATION_SEED)


def build_evaluator(settings: Train, files: ModelFiles, held_out: HeldOutSamples | None) -> Evaluator | None:
    """Build the evaluation on the samples of --eval_remote, a microbatch at a time; None without samples."""
    if held_out is None:
        return None
    microbatch = settings.device_train_microbatch_size
    tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
    data = build_loader(held_out, microbatch, settings.num_workers, tokenizer, settings.max_bad_samples)
    return Evaluator(label='eval', dataloader=data, eval_interval=settings.eval_interval,
                     device_eval_microbatch_size=microbatch)
