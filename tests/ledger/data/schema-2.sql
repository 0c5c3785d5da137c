BEGIN TRANSACTION;
CREATE TABLE batch_samples (
	batch_id VARCHAR NOT NULL, 
	position INTEGER NOT NULL, 
	report_id VARCHAR NOT NULL, 
	receipt_id VARCHAR NOT NULL, 
	group_key VARCHAR NOT NULL, 
	reward FLOAT NOT NULL, 
	trains BOOLEAN NOT NULL, 
	PRIMARY KEY (batch_id, position), 
	FOREIGN KEY(batch_id) REFERENCES batches (id), 
	FOREIGN KEY(report_id) REFERENCES reports (id), 
	FOREIGN KEY(receipt_id) REFERENCES receipts (id)
);
INSERT INTO "batch_samples" VALUES('b1',0,'rep3','req1.0','g',0.0,1);
INSERT INTO "batch_samples" VALUES('b1',1,'rep4','req2.0','g',1.0,1);
INSERT INTO "batch_samples" VALUES('b2',0,'rep-chain','req5.0','g',0.5,1);
INSERT INTO "batch_samples" VALUES('b2',1,'rep-chain','req6.0','g',0.5,1);
CREATE TABLE batches (
	id VARCHAR NOT NULL, 
	scenario VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	attempt INTEGER NOT NULL, 
	base_release VARCHAR NOT NULL, 
	settings TEXT NOT NULL, 
	microbatches TEXT NOT NULL, 
	release_id VARCHAR, 
	error TEXT, 
	created_at FLOAT NOT NULL, 
	updated_at FLOAT NOT NULL, 
	begun BOOLEAN DEFAULT true NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (scenario, number), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "batches" VALUES('b1','arithmetic',1,'committed',1,'r0','{"method":{"name":"grpo"},"seed":3}','[[0],[1]]','r1',NULL,1700000001.25,1700000001.25,1);
INSERT INTO "batches" VALUES('b2','arithmetic',2,'reserved',1,'r1','{"method":{"name":"grpo"},"seed":3}','[[0],[1]]',NULL,NULL,1700000001.25,1700000001.25,1);
CREATE TABLE evaluations (
	seq INTEGER NOT NULL, 
	release_id VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (seq), 
	FOREIGN KEY(release_id) REFERENCES releases (id)
);
CREATE TABLE leases (
	name VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	expires_at FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','2');
INSERT INTO "meta" VALUES('run_id','058d');
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('training_scenario','arithmetic');
CREATE TABLE receipts (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	request_id VARCHAR NOT NULL, 
	choice INTEGER NOT NULL, 
	output_ids BLOB NOT NULL, 
	logprobs BLOB NOT NULL, 
	num_tokens INTEGER NOT NULL, 
	spans TEXT NOT NULL, 
	finish_reason VARCHAR NOT NULL, 
	matched TEXT, 
	reproducible BOOLEAN NOT NULL, 
	inexact_reason VARCHAR, 
	digest VARCHAR NOT NULL, 
	claimed_by VARCHAR, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (id), 
	FOREIGN KEY(request_id) REFERENCES requests (id)
);
INSERT INTO "receipts" VALUES(1,'req1.0','req1',0,X'0A00000002000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'0b45134e72d9b49489eda0ef4a00166ee5ff7b43f1541bdbbf89e6c27cf6e2dd','rep3',1700000000.25);
INSERT INTO "receipts" VALUES(2,'req2.0','req2',0,X'0B00000002000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'f6fffbb899c905d7f61c7ef971ff9dc12a2b59574066adf6cfdecb646b580af2','rep4',1700000000.25);
INSERT INTO "receipts" VALUES(3,'req5.0','req5',0,X'0A000000',X'CDCCCCBD',1,'[[0,1,"r0"]]','stop',NULL,1,NULL,'0f6428f74b74d5c9a465969c6be0ba2ae754a234f1748bc2371be928eb2da366','rep-chain',1700000000.25);
INSERT INTO "receipts" VALUES(4,'req6.0','req6',0,X'0B0000000C000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r1"]]','stop',NULL,1,NULL,'bc835a008c84dc4d7c710a28174e51511aad1b0948c25bb3a31045feec143a45','rep-chain',1700000000.25);
INSERT INTO "receipts" VALUES(5,'req7.0','req7',0,X'',X'',1,'[[0,1,"r0"]]','stop',NULL,1,NULL,'346b6762d154f45837d550a1bc01373e61da76c5bf36f8c47447f69fceb163dc',NULL,1700000000.25);
INSERT INTO "receipts" VALUES(6,'req8.0','req8',0,X'02000000',X'CDCCCCBD',1,'[[0,1,"r0"]]','stop',NULL,1,NULL,'5c3db6cb8e17ca2fd79f564399013cb6582676ece15f0189099d05d21843e291',NULL,1700000000.25);
CREATE TABLE releases (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	scenario VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	parent VARCHAR, 
	content_id VARCHAR NOT NULL, 
	operation VARCHAR NOT NULL, 
	policy_version INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	batch_id VARCHAR, 
	path TEXT NOT NULL, 
	checkpoint TEXT, 
	restorable BOOLEAN NOT NULL, 
	metrics TEXT NOT NULL, 
	verified_at FLOAT, 
	created_at FLOAT NOT NULL, 
	source VARCHAR, 
	state VARCHAR DEFAULT 'released' NOT NULL, 
	reason TEXT, 
	state_at FLOAT, 
	replay_diverged BOOLEAN DEFAULT false NOT NULL, 
	num_deleted INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (scenario, number), 
	UNIQUE (id), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "releases" VALUES(1,'r0','arithmetic',0,NULL,'sha256:0','base',0,0,NULL,'/weights/r0',NULL,1,'{}',NULL,1700000000.25,NULL,'released',NULL,NULL,0,0);
INSERT INTO "releases" VALUES(2,'r1','arithmetic',1,'r0','sha256:1','train',1,1,'b1','/weights/r1',NULL,1,'{}',NULL,1700000001.25,NULL,'released',NULL,NULL,0,0);
CREATE TABLE report_receipts (
	report_id VARCHAR NOT NULL, 
	position INTEGER NOT NULL, 
	receipt_id VARCHAR NOT NULL, 
	PRIMARY KEY (report_id, position), 
	UNIQUE (report_id, receipt_id), 
	FOREIGN KEY(report_id) REFERENCES reports (id), 
	FOREIGN KEY(receipt_id) REFERENCES receipts (id)
);
INSERT INTO "report_receipts" VALUES('rep3',0,'req1.0');
INSERT INTO "report_receipts" VALUES('rep4',0,'req2.0');
INSERT INTO "report_receipts" VALUES('rep-chain',0,'req5.0');
INSERT INTO "report_receipts" VALUES('rep-chain',1,'req6.0');
INSERT INTO "report_receipts" VALUES('rep-note',0,'req8.0');
CREATE TABLE reports (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	scenario VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	digest VARCHAR NOT NULL, 
	score FLOAT, 
	state VARCHAR NOT NULL, 
	reason VARCHAR, 
	group_key VARCHAR, 
	prompt_digest VARCHAR, 
	releases TEXT, 
	batch_id VARCHAR, 
	created_at FLOAT NOT NULL, 
	updated_at FLOAT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (id), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "reports" VALUES(1,'rep3','arithmetic','{"references":["req1.0"],"score":0}','dda63d4a6771ee77870265db6ee0708fca3f86431004009fd140c1c5c65f59be',0.0,'trained',NULL,'prompt:a67631f3a55c24e2653a3589044c1b36','185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','["r0"]','b1',1700000000.25,1700000001.25);
INSERT INTO "reports" VALUES(2,'rep4','arithmetic','{"references":["req2.0"],"score":1}','7e102a0251b18fc74bc73bebdda52b74ed2a2afaefd5c880a27d5c315e18752a',1.0,'trained',NULL,'prompt:a67631f3a55c24e2653a3589044c1b36','185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','["r0"]','b1',1700000000.25,1700000001.25);
INSERT INTO "reports" VALUES(3,'rep-chain','arithmetic','{"references":["req5.0","req6.0"],"score":0.5}','390d16528410b90e965ed40474ac3c95efdf669036c32b9fd55779113bb76ded',0.5,'reserved',NULL,'prompt:5eca36911b89a189b6e072dc792cf06b','9a303c4e1d10f3fef5d98c3b409f99e2da86a87632d8057deab2fda339167486','["r0","r1"]','b2',1700000000.25,1700000001.25);
INSERT INTO "reports" VALUES(4,'rep-note','arithmetic','{"feedback":"a text","references":["req8.0"]}','e296dc2deb2acace9daae9bd5ffa77a3d7e8037f500de83c6448dd416465ffd0',NULL,'recorded','no_score','prompt:a8b5420105684772e18618ee20d07bd7','5e1e6953392a754529f526353e272a7fbf2648ed8d9e6861ed87c4df349df5b3','["r0"]',NULL,1700000000.25,1700000000.25);
CREATE TABLE requests (
	id VARCHAR NOT NULL, 
	scenario VARCHAR NOT NULL, 
	session VARCHAR, 
	purpose VARCHAR NOT NULL, 
	api VARCHAR NOT NULL, 
	parent VARCHAR, 
	prompt_ids BLOB NOT NULL, 
	prompt_length INTEGER NOT NULL, 
	prompt_digest VARCHAR NOT NULL, 
	sampling TEXT NOT NULL, 
	body BLOB NOT NULL, 
	tags TEXT NOT NULL, 
	template_digest VARCHAR, 
	tokenizer_digest VARCHAR, 
	engine_build VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	deleted_at FLOAT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "requests" VALUES('req1','arithmetic',NULL,'train','chat',NULL,X'010000000200000003000000',3,'185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25,NULL);
INSERT INTO "requests" VALUES('req2','arithmetic',NULL,'train','chat',NULL,X'010000000200000003000000',3,'185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25,NULL);
INSERT INTO "requests" VALUES('req5','arithmetic','s','train','chat',NULL,X'0100000002000000',2,'9a303c4e1d10f3fef5d98c3b409f99e2da86a87632d8057deab2fda339167486','{"max_tokens":4,"temperature":0.7}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{"team":"blue"}',NULL,NULL,'engine 1',1700000000.25,NULL);
INSERT INTO "requests" VALUES('req6','arithmetic','s','train','chat','req5.0',X'03000000',4,'db82ecd3c442c30b05a80bf193f2699984b6fa43d91b799b3b969b3edf722ac7','{"max_tokens":4,"temperature":0.7}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25,NULL);
INSERT INTO "requests" VALUES('req7','arithmetic',NULL,'train','chat',NULL,X'',1,'5414fc98eba50053571a054e9821c5a11110c6d4216a3ea9c52bf57a37497fd9','{"max_tokens":8}',X'','{}',NULL,NULL,'engine 1',1700000000.25,10.0);
INSERT INTO "requests" VALUES('req8','arithmetic',NULL,'train','chat',NULL,X'01000000',1,'5e1e6953392a754529f526353e272a7fbf2648ed8d9e6861ed87c4df349df5b3','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25,NULL);
CREATE TABLE scenarios (
	name VARCHAR NOT NULL, 
	recipe VARCHAR NOT NULL, 
	mode VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "scenarios" VALUES('arithmetic','grpo','auto',1700000000.25);
CREATE INDEX requests_session ON requests (scenario, session) WHERE session IS NOT NULL;
CREATE INDEX requests_parent ON requests (parent) WHERE parent IS NOT NULL;
CREATE INDEX reports_queue ON reports (scenario, state, seq);
CREATE INDEX reports_batch ON reports (batch_id);
CREATE INDEX reports_group ON reports (scenario, state, group_key);
CREATE UNIQUE INDEX batches_reserved ON batches (scenario) WHERE state = 'reserved';
CREATE INDEX releases_batch ON releases (batch_id);
CREATE INDEX releases_checkpoint ON releases (scenario, checkpoint);
CREATE INDEX releases_jumps ON releases (scenario, number) WHERE source IS NOT NULL;
CREATE INDEX releases_kept ON releases (scenario, restorable, number);
CREATE INDEX ix_receipts_request_id ON receipts (request_id);
CREATE INDEX ix_evaluations_release_id ON evaluations (release_id);
CREATE INDEX ix_report_receipts_receipt_id ON report_receipts (receipt_id);
CREATE INDEX batch_samples_report ON batch_samples (report_id);
COMMIT;
