"""The batch that the managers are tested on: two prompt columns, four response columns."""

import pytest
import torch
from reward_samples import ANSWERS, TRUTHS

from meshrl.data.batch import DataProto, object_array


@pytest.fixture
def data(tokenizer) -> DataProto:
    responses = torch.full((4, 4), tokenizer.pad_token_id)
    mask = torch.zeros(4, 4, dtype=torch.long)
    for row, answer in enumerate(ANSWERS):
        ids = tokenizer(answer)["input_ids"] if answer else []
        responses[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        mask[row, : len(ids)] = 1
    return DataProto.from_dict(
        tensors={
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.tensor([[0, 1], [1, 1], [0, 1], [1, 1]]), mask], 1),
        },
        non_tensors={
            "uid": object_array(["u0", "u1", "u2", "u3"]),
            "data_source": object_array(["s0", "s1", "s2", "s3"]),
            "ground_truth": object_array(TRUTHS),
            "extra_info": object_array([{"n": i} for i in range(4)]),
        },
    )
