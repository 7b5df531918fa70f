-- What was last said of a local step's progress, a JSON object: the next permit for it carries that.
ALTER TABLE twiceshy.step ADD COLUMN progress bytea;
