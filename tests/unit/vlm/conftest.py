import pytest

from tests.tiny.families import MODELS, Zoo


@pytest.fixture(scope="session")
def zoo():
    """Tiny models and batches for them."""
    return Zoo()


@pytest.fixture(params=MODELS)
def family(request):
    """The name of each tiny model in turn."""
    return request.param
