"""Documents to token shards, and shards to batches.

Writing, in the order of the data:

    documents        the clean documents of a corpus; which are held out, and which train the tokenizer
    tokenizer/       text to ids and back
    encode           batches of documents to ids
    pretokenized     tokens that other programs wrote
    tasks            the tasks that count, sample, encode and write shards
    shards/          the files of a shard, the folder of a run, the stream of a split
    packing          documents to sequences
    build            the tokens stage

Reading:

    order            a shuffle as arithmetic
    mixture, phases  which source each sample comes from
    loader           the batch of any step
    held_out         the samples of validation
    degenerate_text  targets that the loss ignores
    trace            from a step or a token to its documents, and back
    summary          facts about the tokens of a run, before it trains
"""
