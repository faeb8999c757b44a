"""Further models of images and sounds, for each of which one test checks everything at once."""

from typing import Any

from tests.families.family import BERT, TEXT, Family, new
from tests.families.vision import CLIP, DINO, IMAGE, LAMBDA, VIT

SOUND: dict[str, Any] = {key: TEXT[key] for key in TEXT if key != "max_position_embeddings"}
SOUND |= {"conv_dim": (16, 16), "conv_stride": (8, 4), "conv_kernel": (8, 4)}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
WAV2VEC2: dict[str, Any] = {
    "layer": "encoder.layers.{}",
    "value": "attention.v_proj",
    "projection": "attention.out_proj",
    "final_norm": "layer_norm",
    "style": "post-norm",
    "signal": (320,),
    "positions": "convolution",
}

SPECTROGRAM: dict[str, Any] = {key: value for key, value in IMAGE.items() if key != "image_size"}
SPECTROGRAM |= {"max_length": 16, "num_mel_bins": 12, "frequency_stride": 4, "time_stride": 4}

FURTHER_VISION = {
    "chinese-clip-vision": Family(new("ChineseCLIPVisionModel", **IMAGE), **CLIP),
    "internvl-vision": Family(
        new("InternVLVisionModel", **IMAGE),
        **VIT | LAMBDA | {"layer": "encoder.layer.{}", "projection": "attention.projection_layer"},
    ),
    "qianfan-ocr-vision": Family(
        new("QianfanOCRVisionModel", **IMAGE), **VIT | LAMBDA | {"projection": "attention.projection_layer"}
    ),
    "pixio": Family(new("PixioModel", **IMAGE), **VIT),
    "pixtral-vision": Family(
        new("PixtralVisionModel", **IMAGE),
        **VIT | {"layer": "transformer.layers.{}", "centered": False, "positions": "rotary"},
    ),
    "sapiens2": Family(
        new("Sapiens2Model", **IMAGE, layerscale_value=0.5),
        **DINO | {"layer": "model.layer.{}", "centered": False, "positions": "rotary"},
    ),
    "tipsv2-vision": Family(new("Tipsv2VisionModel", **IMAGE, layerscale_value=0.5), **DINO),
    "vit-msn": Family(new("ViTMSNModel", **IMAGE), **VIT),
    "audio-spectrogram": Family(new("ASTModel", **SPECTROGRAM), **VIT | {"signal": (16, 12)}),
}
FURTHER_AUDIO = {
    "data2vec-audio": Family(new("Data2VecAudioModel", **SOUND, conv_pos_kernel_size=3), **WAV2VEC2),
    "hubert": Family(new("HubertModel", **SOUND), **WAV2VEC2),
    "wav2vec2": Family(new("Wav2Vec2Model", **SOUND), **WAV2VEC2),
    "wav2vec2-large": Family(
        new("Wav2Vec2Model", **SOUND, do_stable_layer_norm=True, feat_extract_norm="layer"),
        **WAV2VEC2 | {"final_norm": None, "style": "pre-norm"},
    ),
    "unispeech": Family(new("UniSpeechModel", **SOUND), **WAV2VEC2),
    "unispeech-sat": Family(new("UniSpeechSatModel", **SOUND), **WAV2VEC2),
    "sew": Family(new("SEWModel", **SOUND), **WAV2VEC2),
    "sew-d": Family(
        new("SEWDModel", **SOUND),
        **BERT | {"layer": "encoder.encoder.layer.{}", "value": "attention.self.value_proj"},
        signal=(320,),
        positions="convolution and relative",
    ),
}
