"""Build loaders of image-caption batches, from synthetic data or from MDS shards.

A batch has `image` uint8 (B, 3, H, H), or `moments` float16 (B, 8, H/8, H/8) that encode.py stored, and `caption` int64
(B, 77). `decode_image` crops and resizes an image when its sample is made. Images stay bytes until a microbatch is on
the device, where `normalize` scales them to [-1, 1].
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
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_pil_image

from sdbench.complete import BATCHES_PER_WORKER
from sdbench.errors import BadSample, DataError, UserError, unreadable_shard
from sdbench.flags.train import SD2_BASE, Run
from sdbench.inputs.batches import (
    CAPTIONS,
    NOISE,
    TIMESTEP,
    BadSamples,
    bad_sample_line,
    choose_caption,
    collate,
    decode_sample,
    normalize,
    require_names,
)
from sdbench.inputs.images import decode_image, decode_whole_image
from sdbench.inputs.loader import CountedCollate, TimedDataLoader, TimedStreamingDataLoader, begin_worker
from sdbench.inputs.shards import MOMENTS, hash_of_images, number_of_samples, read_index, require_same_origin
from sdbench.inputs.stream import VerifiedDataset, VerifiedStream
from sdbench.inputs.tokenizer import CAPTION_LENGTH, CLIP_VOCABULARY, build_tokenizer, token_ids
from sdbench.models.loading import ModelFiles, build_fitting_tokenizer
from sdbench.stores.addresses import PATIENT, Retry

DIFFERENT_SAMPLES = 16  # different synthetic samples, for a loader that collates samples itself
EVALUATION_SEED = 17  # does not depend on --seed, because the losses of trainings with different seeds must compare
MOST_BAD_IN_A_ROW = 1000  # consecutive bad samples that are skipped to find a good one


class SyntheticImageCaptionDataset(Dataset):
    """Random images or latents with random captions. `collate` returns the same tensors for every batch, at no cost.

    Args:
        image_size: height and width of the images, in pixels.
        caption_length: token ids per caption.
        num_samples: samples in an epoch, over all ranks.
        vocab_size: number of token ids; captions are random ids from 0 to vocab_size - 1.
        seed: seed of the random numbers; give each rank a different seed.
        latent_size: height and width L of the latents; samples then have `moments` float16 (8, L, L). None: images.
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
        self.batch = None  # the last batch, which is returned again if the next one has the same size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample: `image` uint8 (3, H, H) or `moments`, and `caption` int64 (77,)."""
        return {name: tensor[index % DIFFERENT_SAMPLES] for name, tensor in self.samples.items()}

    def collate(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        """Return a random batch with as many samples as `samples`, whose content is not used."""
        if self.batch is None or len(self.batch['caption']) != len(samples):
            self.batch = self.random_batch(len(samples))
            if torch.cuda.is_available():  # pinned only once: DataLoader(pin_memory=True) would copy every batch
                self.batch = {name: tensor.pin_memory() for name, tensor in self.batch.items()}
        return dict(self.batch)

    def random_batch(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Return a batch of random samples, which is the same in each call."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.latents:
            moments = torch.randn(batch_size, 8, self.latent_size, self.latent_size, generator=generator)
            batch = {MOMENTS: moments.half()}
        else:
            size = (batch_size, 3, self.image_size, self.image_size)
            batch = {'image': torch.randint(256, size, dtype=torch.uint8, generator=generator)}
        batch['caption'] = torch.randint(self.vocab_size, (batch_size, self.caption_length), generator=generator)
        return batch


class StreamingLAIONDataset(VerifiedDataset):
    """Samples from MDS shards with the columns `jpg` (bytes) and `caption` (str), or with encode.py's `moments`.

    The random choices for a sample (which of its captions, whether the caption is dropped, whether the image is
    mirrored) depend only on `shuffle_seed`, the epoch and the sample's index. Therefore a resumed run makes the same
    choices, with any number of ranks and loader workers. `sample(index)` returns a sample without random choices.

    torch's own DataLoader can collate the samples. `build_loader` is faster, because it tokenizes batch by batch.

    Args:
        remote: folder or object store with the shards. A local folder is read in place unless `local` is given.
        local: folder for cached shards, with a subfolder for each dataset (default: a subfolder of the system's folder
            for temporary files). Without `remote`, the folder with the shards, which is read in place.
        split: subfolder of `remote` and `local`.
        shuffle: whether each epoch has a different random order.
        tokenizer_name_or_path: folder or hub name of a tokenizer (default: CLIP's vocabulary, without a download).
        transform: function of a stored image, a PIL.Image in RGB. Its result becomes the sample's `image`.
        predownload: samples to fetch ahead (default: Streaming's, which is a few batches).
        download_retry: attempts per request to a store; the pauses in between get longer.
        download_timeout: seconds without any data, after which a request is tried again.
        batch_size: samples per device.
        image_size: height and width in pixels to which images are resized, unless there is a transform.
        index: the index.json of `remote`, if it was read already.
        cache_limit: size of the cache in bytes, or a text such as 500gb, above which the oldest copies are deleted.
        caption_weights: weight of each name of captions (default: all captions of an image have the same chance).
        caption_drop: fraction of captions replaced by the empty caption, for classifier-free guidance, which needs a
            model that can also generate without a caption (Ho and Salimans 2022).
        random_flip: whether a random half of the images is mirrored.
        kwargs: more arguments for `streaming.StreamingDataset`.

    Raises UserError if an argument does not fit these shards.
    """
    def __init__(self, remote: str | None = None, local: str | None = None, split: str | None = None,
                 shuffle: bool = False, tokenizer_name_or_path: str = SD2_BASE, transform: Callable | None = None,
                 predownload: int | None = None, download_retry: int = PATIENT.tries,
                 download_timeout: float = PATIENT.timeout, batch_size: int | None = None, *, image_size: int = 512,
                 index: dict | None = None, cache_limit: int | str | None = None,
                 caption_weights: Mapping[str, float] | None = None, caption_drop: float = 0.0,
                 random_flip: bool = False, **kwargs):
        if remote is None and local is None:
            raise UserError('StreamingLAIONDataset needs a remote, or a local folder with shards')
        self.transform = transform
        self.decode = partial(decode_image, image_size=image_size)
        if transform:
            self.decode = decode_whole_image  # a transform gets the whole image, not only its centre square

        # Return captions as token ids until `build_loader` sets `gives_text`, because it tokenizes batch by batch.
        self.gives_text = False
        if tokenizer_name_or_path != SD2_BASE:
            self.tokenizer = build_tokenizer(tokenizer_name_or_path)

        # Read index.json, and check that the arguments fit the shards.
        if split:
            remote = remote and os.path.join(remote, split)
            local = local and os.path.join(local, split)
        if index is None:
            index = read_index(remote or local, '--remote' if remote else '--local')
        self.latents = 'latents' in index
        if (transform or random_flip) and self.latents:
            raise UserError('transform and random_flip need images, and these shards hold latents; omit the argument, '
                            'or give the shards of images')
        self.caption_drop = caption_drop
        self.random_flip = random_flip
        self.caption_weights = caption_weights or {}
        require_names(self.caption_weights, index, '--caption_weights', remote or local)
        self.index = index

        # Open the shards.
        stream = VerifiedStream(index, remote, local, cache_limit, Retry(download_retry, download_timeout))
        super().__init__(stream, shuffle=shuffle, predownload=predownload, batch_size=batch_size, **kwargs)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return build_tokenizer()

    def __getitem__(self, index: int) -> dict:
        """Return sample `index`, or the next good sample if it is bad, with tensors for torch's collate function.

        The sample has `image` uint8 (3, image_size, image_size), or the transform's result, or `moments` float16 (8,
        H/8, H/8), and `caption` int64 (77,). With `gives_text`, `caption` is a text, and `bad` lists the bad samples
        that were skipped.
        """
        sample = self.good_sample(index)

        # Make the random choices for this epoch. `next_epoch` is 0 before the first iteration, then the epoch plus one.
        epoch = max(0, self.next_epoch - 1)
        generator = np.random.default_rng((self.shuffle_seed, epoch, index))
        for_drop, for_flip = generator.random(2)
        sample['caption'] = choose_caption(sample.pop(CAPTIONS), self.caption_weights, generator)
        if for_drop < self.caption_drop:
            sample['caption'] = ''
        if self.random_flip and for_flip < 0.5:
            sample['image'] = sample['image'].flip(-1)

        # Our loader tokenizes captions and reports bad samples for a whole batch. For torch's loader do it here.
        if self.gives_text:
            return sample
        for number, reason in sample.pop('bad'):
            print(bad_sample_line(number, reason), file=sys.stderr)
        if self.transform:
            sample['image'] = self.transform(to_pil_image(sample['image']))
        [ids] = token_ids(self.tokenizer, [sample['caption']])
        return sample | {'caption': torch.tensor(ids)}

    def good_sample(self, index: int) -> dict:
        """Return `sample(index)`, or the next good sample if it is bad. `bad` has (index, reason) of each bad sample.

        Raises DataError if a shard cannot be read, or if MOST_BAD_IN_A_ROW consecutive samples are bad.
        """
        bad = []
        for candidate in range(index, index + MOST_BAD_IN_A_ROW):
            candidate = int(candidate % self.num_samples)
            try:
                return self.sample(candidate) | {'bad': bad}
            except BadSample as error:
                bad.append((candidate, str(error)))
        raise DataError(f'{len(bad):,} consecutive samples are bad; the first is sample {bad[0][0]}: {bad[0][1]}')

    def sample(self, index: int) -> dict:
        """Return `image` uint8 (3, H, H) or `moments` float16 (8, H/8, H/8), the first `caption`, and all `captions`.

        Raises BadSample if the sample is bad, and DataError if its shard cannot be read or does not match index.json.
        """
        try:
            columns = super().__getitem__(index)
        except DataError:
            raise
        except UnicodeDecodeError:
            raise BadSample('the caption is not UTF-8') from None
        except Exception as error:  # every storage client has its own types of errors
            raise unreadable_shard(error) from None

        return decode_sample(columns, CAPTIONS in self.index, self.decode)


class HeldOutSamples(Dataset):
    """Held-out samples for an evaluation, each with noise and a timestep that depend only on its index and the seed.

    Therefore the loss of given weights is the same with any number of ranks, with microbatches of any size, and at any
    time during training. A bad sample is replaced by the next good one. `latent_size` is the height and the width of
    the model's latents.
    """

    def __init__(self, samples: StreamingLAIONDataset, latent_size: int, num_timesteps: int, seed: int):
        self.samples = samples
        self.index = samples.index
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
        noise = {NOISE: torch.randn(8, side, side, generator=generator),
                 TIMESTEP: torch.randint(self.num_timesteps, (), generator=generator)}
        return self.samples.good_sample(index) | noise


def build_loader(dataset: Dataset, batch_size: int, num_workers: int, tokenizer: Tokenizer | None = None,
                 max_bad_samples: float = 0.01) -> DataSpec:
    """Build a loader for Composer's Trainer.

    In training every batch is full. In an evaluation each sample is used once, in order and divided among the ranks,
    and the last batch may be smaller.

    Args:
        dataset: SyntheticImageCaptionDataset or StreamingLAIONDataset for training, HeldOutSamples for evaluation. A
            StreamingLAIONDataset returns its captions as text from now on.
        batch_size: samples per device.
        num_workers: worker processes per device; the synthetic dataset uses none.
        tokenizer: tokenizer for the captions (default: the tokenizer of the StreamingLAIONDataset).
        max_bad_samples: fraction of samples that may be bad before the run ends.

    Raises UserError if the dataset has a transform, because this loader scales images on the device.
    """
    if tokenizer is None and isinstance(dataset, StreamingLAIONDataset):
        tokenizer = dataset.tokenizer
    make_batch = partial(collate, tokenizer=tokenizer)
    workers = {'num_workers': num_workers, 'worker_init_fn': begin_worker,
               'pin_memory': torch.cuda.is_available()}

    # Choose a loader for the dataset.
    if isinstance(dataset, SyntheticImageCaptionDataset):
        sampler = dist.get_sampler(dataset, drop_last=True)
        loader = TimedDataLoader(dataset, batch_size, sampler=sampler, drop_last=True, collate_fn=dataset.collate)
    elif isinstance(dataset, HeldOutSamples):
        loader = TimedDataLoader(dataset, batch_size, sampler=dist.get_sampler(dataset), collate_fn=make_batch,
                                 **workers)
    else:
        if dataset.transform:
            raise UserError('build_loader takes no dataset with a transform; use torch.utils.data.DataLoader')
        dataset.gives_text = True
        loader = TimedStreamingDataLoader(dataset, batch_size=batch_size, drop_last=True,
                                          collate_fn=CountedCollate(make_batch, num_workers),
                                          prefetch_factor=BATCHES_PER_WORKER if num_workers else None,
                                          persistent_workers=num_workers > 0, **workers)

    # Count bad samples in each batch, and normalize each microbatch when it is on the device.
    return DataSpec(loader, batch_transforms=BadSamples(max_bad_samples), microbatch_transforms=normalize)


def build_data(settings: Run, files: ModelFiles, index: dict | None) -> DataSpec:
    """Build the training loader, for the images or latents of --remote or for synthetic data.

    `index` is the index.json of --remote; None means synthetic data.

    Raises UserError if the latents or the tokenizer do not fit the model.
    """
    image_size = settings.image_size
    seed = settings.seed

    # Synthetic data needs no workers, because every batch is the same.
    if index is None:
        latent_size = files.latent_size(image_size) if settings.latents else None
        samples = settings.batches_per_epoch * settings.batch_size
        dataset = SyntheticImageCaptionDataset(image_size, num_samples=samples, vocab_size=files.vocab_size,
                                               seed=seed + dist.get_global_rank(), latent_size=latent_size)
        return build_loader(dataset, settings.device_batch_size, num_workers=0)

    # Latents must come from the VAE of this model. Images do not, and hashing the VAE's weights takes seconds.
    if settings.latents:
        require_same_origin(settings.remote, index, files.origin_of_latents(image_size))
    tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
    dataset = StreamingLAIONDataset(settings.remote, settings.local, image_size=image_size, index=index,
                                    cache_limit=settings.cache_limit, batch_size=settings.device_batch_size,
                                    epoch_size=settings.batches_per_epoch * settings.batch_size,
                                    caption_weights=dict(settings.caption_weights), caption_drop=settings.caption_drop,
                                    random_flip=settings.random_flip, shuffle=True, shuffle_seed=seed)
    return build_loader(dataset, settings.device_batch_size, settings.num_workers, tokenizer, settings.max_bad_samples)


def open_held_out(settings: Run, files: ModelFiles, trained_on: Dataset) -> HeldOutSamples | None:
    """Open the dataset of --eval_remote. Return None without the flag.

    If the training dataset, `trained_on`, holds latents, the model has no VAE.

    Raises UserError if the samples do not fit the model, or if the run trains on the same samples.
    """
    remote = settings.eval_remote
    if not remote:
        return None
    flag = '--eval_remote'

    # Refuse data that this model cannot be evaluated on: latents of another VAE, images if the training is on latents
    # without a VAE, and the training data itself.
    index = read_index(remote, flag)
    if 'latents' in index:
        require_same_origin(remote, index, files.origin_of_latents(settings.image_size), flag)
    elif trained_on.latents:
        raise UserError(f'{flag} {remote} holds images, but the training is on latents and has no VAE; encode these '
                        'images, too')
    if settings.remote and hash_of_images(index) == hash_of_images(trained_on.index):
        raise UserError(f'{flag} {remote} has the same images as the training data --remote {settings.remote}; give '
                        'shards of other images')
    if number_of_samples(index) == 0:
        raise UserError(f'{flag} {remote} holds no samples')

    # Open the samples with the training's cache flags, and give each sample its noise and timestep.
    images = StreamingLAIONDataset(remote, settings.local, image_size=settings.image_size, index=index, batch_size=1,
                                   cache_limit=settings.cache_limit)
    timesteps = len(DDPMScheduler.from_config(files.configs['scheduler']))
    return HeldOutSamples(images, files.latent_size(settings.image_size), timesteps, EVALUATION_SEED)


def build_evaluator(settings: Run, files: ModelFiles, held_out: HeldOutSamples | None) -> Evaluator | None:
    """Build Composer's evaluation on held-out samples, in batches as large as a microbatch; None without samples."""
    if held_out is None:
        return None
    microbatch = settings.device_train_microbatch_size
    tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
    data = build_loader(held_out, microbatch, settings.num_workers, tokenizer, settings.max_bad_samples)
    return Evaluator(label='eval', dataloader=data, eval_interval=lambda state, event: False,  # EndOfBatch evaluates
                     device_eval_microbatch_size=microbatch)
