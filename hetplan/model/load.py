"""From a model file, hetplan's own or a Hugging Face config.json, to a ModelSpec."""

from __future__ import annotations

from pathlib import Path

from hetplan.files.reading import read_document
from hetplan.model.file_form import model_of_document
from hetplan.model.huggingface import is_huggingface, model_of_config
from hetplan.model.spec import ModelSpec


def load_model(path: str | Path) -> ModelSpec:
    """The model that the file describes; one InputError with every fault otherwise.

    A file without hetplan's `schema` key that has `model_type` or `architectures` is the
    config.json of a Hugging Face model: it is read as data, nothing in it is executed. Every
    other file is in hetplan's own form (configs/models).
    """
    document = read_document(Path(path))
    if is_huggingface(document):
        return model_of_config(document)
    return model_of_document(document)
