"""What plans measure of a model's shape is measured once for all tests of this folder."""

import pytest

from meshrl.tools.plan import models


@pytest.fixture(autouse=True, scope="package")
def models_made_once():
    made, make = {}, models._planned

    def find_or_make(*about):
        key = repr(about)
        if key not in made:
            made[key] = make(*about)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_planned", find_or_make)
        yield
