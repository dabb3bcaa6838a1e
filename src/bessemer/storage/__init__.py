"""Files on disks, in object stores and on the Hugging Face hub."""
