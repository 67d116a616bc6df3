"""What training needs of its model beside Composer's own methods."""
from composer import ComposerModel
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel


class DiffusionModel(ComposerModel):
    """A model with the parts of Stable Diffusion, of which the UNet learns; benchmark.StableDiffusion is one.

    Attributes:
        unet, text_encoder, scheduler: those parts.
        vae: None where the training is on latents.
        image_size: in pixels.
        latent_size: height and width of its latents.
        scaling_factor: of the latents.
        flops_per_image: of each part.
        prediction_type: what the UNet predicts, epsilon or v_prediction.
    """
    unet: UNet2DConditionModel
    vae: AutoencoderKL | None
    text_encoder: CLIPTextModel
    scheduler: DDPMScheduler
    image_size: int
    latent_size: int
    scaling_factor: float
    flops_per_image: dict[str, int]
    prediction_type: str
