"""Trained models in the format of Hugging Face's transformers.

Importing this package makes AutoConfig, AutoModelForCausalLM and AutoTokenizer know the folders that ``evaluate.py
export=DIR`` writes::

    import selmodel.huggingface
    model = AutoModelForCausalLM.from_pretrained(DIR)
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from selmodel.huggingface.cache import SelModelCache
from selmodel.huggingface.configuration import SelModelConfig
from selmodel.huggingface.modeling import SelModelForCausalLM
from selmodel.huggingface.tokenization import SelModelTokenizer

AutoConfig.register(SelModelConfig.model_type, SelModelConfig)
AutoModelForCausalLM.register(SelModelConfig, SelModelForCausalLM)
AutoTokenizer.register(SelModelConfig, tokenizer_class=SelModelTokenizer)

__all__ = ["SelModelCache", "SelModelConfig", "SelModelForCausalLM", "SelModelTokenizer"]
