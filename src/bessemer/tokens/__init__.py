"""Turn documents into token shards, and token shards into training batches.

Modules that write, in the order of the data:

    documents        read the clean documents of a corpus; choose the held-out ones and the tokenizer's training sample
    tokenizer/       convert between text and token ids
    encode           encode batches of documents
    tasks            count, sample, encode and write shards as parallel tasks
    shards/          shard files, the tokens folder of a run, the token stream of a split
    packing          pack documents into sequences
    build            run the tokens stage

Modules that read:

    order            shuffle by a computed permutation, without stored state
    mixture, phases  choose the source of each sample
    loader           build the batch of any step
    held_out         build the samples of validation
    degenerate_text  find targets that the loss ignores
    trace            map a step to its documents, and back
    summary          report facts about a run's tokens before it trains
"""
