CREATE TABLE IF NOT EXISTS payments (item text);
