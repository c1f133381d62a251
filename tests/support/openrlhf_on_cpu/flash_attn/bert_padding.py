from flash_attn.utils.distributed import all_gather

index_first_axis = pad_input = unpad_input = rearrange = all_gather
