-- Every statement that Python sends, each under its name and one line of what it is for.
-- What must be one round trip and one transaction stands as a function in migrations/.

-- migration_lock: one process migrates at a time; let go at the transaction's end
SELECT pg_advisory_xact_lock(8461279530427);

-- migration_schema_stands: whether our schema is there
SELECT true FROM pg_namespace WHERE nspname = 'twiceshy';

-- migration_schema: all we own stands in one schema
CREATE SCHEMA twiceshy;

-- migration_table_stands: whether the list of applied migrations is there
SELECT to_regclass('twiceshy.migration') IS NOT NULL;

-- migration_table: which migrations were applied
CREATE TABLE twiceshy.migration (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());

-- migrations: the applied ones
SELECT name FROM twiceshy.migration;

-- migration_applied: one more
INSERT INTO twiceshy.migration (name) VALUES ($1);

-- installation: the secret, made once
INSERT INTO twiceshy.installation (secret) VALUES ($1) ON CONFLICT DO NOTHING;
