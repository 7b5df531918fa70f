-- The API: its keys, what runs are labelled with, lists in pages, and what replay has saved.

-- A key is "ts-ID-SECRET"; of the secret only its hash is here.
CREATE TABLE twiceshy.api_key (
    id      text COLLATE "C" PRIMARY KEY,
    digest  twiceshy.bytes_32 NOT NULL,
    made_at timestamptz NOT NULL DEFAULT twiceshy.now()
);

-- What whoever started a run says of it, to find it by. created_at is the run's, so that its index gives them in order.
CREATE TABLE twiceshy.attribute (
    run_id     text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    value      text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (run_id, name)
);
CREATE INDEX attribute_value ON twiceshy.attribute (name, value, created_at, run_id);

CREATE INDEX run_created ON twiceshy.run (created_at, id);

-- Of the tape, what is added up over many runs.
ALTER TABLE twiceshy.attempt
    ADD COLUMN replayed bigint NOT NULL DEFAULT 0,
    ADD COLUMN joined bigint NOT NULL DEFAULT 0,
    ADD COLUMN calls_saved bigint NOT NULL DEFAULT 0,
    ADD COLUMN tokens_saved bigint NOT NULL DEFAULT 0;
