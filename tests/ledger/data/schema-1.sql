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
INSERT INTO "batch_samples" VALUES('b1',0,'rep5','req1.0','g',0.0,1);
INSERT INTO "batch_samples" VALUES('b1',1,'rep6','req2.0','g',1.0,1);
INSERT INTO "batch_samples" VALUES('b2',0,'rep7','req3.0','g',0.0,1);
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
	PRIMARY KEY (id), 
	UNIQUE (scenario, number), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "batches" VALUES('b1','arithmetic',1,'committed',1,'r0','{"method":{"name":"grpo"},"seed":3}','[[0],[1]]','r1',NULL,1700000001.25,1700000001.25);
INSERT INTO "batches" VALUES('b2','arithmetic',2,'reserved',1,'r1','{"method":{"name":"grpo"},"seed":3}','[[0]]',NULL,NULL,1700000001.25,1700000001.25);
CREATE TABLE evaluations (
	seq INTEGER NOT NULL, 
	release_id VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (seq), 
	FOREIGN KEY(release_id) REFERENCES releases (id)
);
INSERT INTO "evaluations" VALUES(1,'r1','{"accuracy":0.5}',1.0);
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','1');
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('run_id','7ec4');
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
INSERT INTO "receipts" VALUES(1,'req1.0','req1',0,X'0A00000002000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'0b45134e72d9b49489eda0ef4a00166ee5ff7b43f1541bdbbf89e6c27cf6e2dd','rep5',1700000000.25);
INSERT INTO "receipts" VALUES(2,'req2.0','req2',0,X'0B00000002000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'f6fffbb899c905d7f61c7ef971ff9dc12a2b59574066adf6cfdecb646b580af2','rep6',1700000000.25);
INSERT INTO "receipts" VALUES(3,'req3.0','req3',0,X'0C00000002000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'be951e35930999d5b4320cee2d47369227522f1e5de81d6bf530b5fc590867ad','rep7',1700000000.25);
INSERT INTO "receipts" VALUES(4,'req4.0','req4',0,X'0D00000002000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'343a93ac6daadc91ba361fb785d8bb972eb2078abf2fcb3eb7d5572c85263b2e','rep8',1700000000.25);
INSERT INTO "receipts" VALUES(5,'req9.0','req9',0,X'0400000005000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'ce6c9904bc61cc5a6e5a367f2f0c2eb4e85a3618f5f7aaf6a194efd1f8051a0a',NULL,1700000000.25);
INSERT INTO "receipts" VALUES(6,'req10.0','req10',0,X'0700000002000000',X'CDCCCCBDCDCC8CBF',2,'[[0,2,"r0"]]','stop',NULL,1,NULL,'cc079333e78d5d3bc193b2be467e38f4e5ca8f8ba3384c49203dfd468c8f8695',NULL,1700000000.25);
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
	PRIMARY KEY (seq), 
	UNIQUE (scenario, number), 
	UNIQUE (id), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "releases" VALUES(1,'r0','arithmetic',0,NULL,'sha256:0','base',0,0,NULL,'/weights/r0',NULL,1,'{}',NULL,1700000000.25);
INSERT INTO "releases" VALUES(2,'r1','arithmetic',1,'r0','sha256:1','train',1,1,'b1','/weights/r1',NULL,1,'{}',NULL,1700000001.25);
CREATE TABLE report_receipts (
	report_id VARCHAR NOT NULL, 
	position INTEGER NOT NULL, 
	receipt_id VARCHAR NOT NULL, 
	PRIMARY KEY (report_id, position), 
	UNIQUE (report_id, receipt_id), 
	FOREIGN KEY(report_id) REFERENCES reports (id), 
	FOREIGN KEY(receipt_id) REFERENCES receipts (id)
);
INSERT INTO "report_receipts" VALUES('rep5',0,'req1.0');
INSERT INTO "report_receipts" VALUES('rep6',0,'req2.0');
INSERT INTO "report_receipts" VALUES('rep7',0,'req3.0');
INSERT INTO "report_receipts" VALUES('rep8',0,'req4.0');
INSERT INTO "report_receipts" VALUES('rep-note',0,'req9.0');
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
	oldest_release VARCHAR, 
	batch_id VARCHAR, 
	created_at FLOAT NOT NULL, 
	updated_at FLOAT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (id), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "reports" VALUES(1,'rep5','arithmetic','{"references":["req1.0"],"score":0}','dda63d4a6771ee77870265db6ee0708fca3f86431004009fd140c1c5c65f59be',0.0,'trained',NULL,'prompt:a67631f3a55c24e2653a3589044c1b36','185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','r0','b1',1700000000.25,1700000001.25);
INSERT INTO "reports" VALUES(2,'rep6','arithmetic','{"references":["req2.0"],"score":1}','7e102a0251b18fc74bc73bebdda52b74ed2a2afaefd5c880a27d5c315e18752a',1.0,'trained',NULL,'prompt:a67631f3a55c24e2653a3589044c1b36','185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','r0','b1',1700000000.25,1700000001.25);
INSERT INTO "reports" VALUES(3,'rep7','arithmetic','{"references":["req3.0"],"score":0}','0eb4f865fc1adf9d0195de9bd0fe5be853bc19da0a7ccb27077e82488a93707e',0.0,'reserved',NULL,'prompt:a67631f3a55c24e2653a3589044c1b36','185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','r0','b2',1700000000.25,1700000001.25);
INSERT INTO "reports" VALUES(4,'rep8','arithmetic','{"references":["req4.0"],"score":1}','a5bc107349ed688c7ae74d8f04a5dea7a91465537e8b9ee82fb82961c3cd171f',1.0,'pending',NULL,'prompt:a67631f3a55c24e2653a3589044c1b36','185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','r0',NULL,1700000000.25,1700000000.25);
INSERT INTO "reports" VALUES(5,'rep-note','arithmetic','{"references":["req9.0"]}','65847a92ea33cb6a567bc1941a3ac148788bd56fd51c2691b7e94919bea698ab',NULL,'recorded','no_score','prompt:a67631f3a55c24e2653a3589044c1b36','185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','r0',NULL,1700000000.25,1700000000.25);
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
	PRIMARY KEY (id), 
	FOREIGN KEY(scenario) REFERENCES scenarios (name)
);
INSERT INTO "requests" VALUES('req1','arithmetic',NULL,'train','chat',NULL,X'010000000200000003000000',3,'185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25);
INSERT INTO "requests" VALUES('req2','arithmetic',NULL,'train','chat',NULL,X'010000000200000003000000',3,'185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25);
INSERT INTO "requests" VALUES('req3','arithmetic',NULL,'train','chat',NULL,X'010000000200000003000000',3,'185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25);
INSERT INTO "requests" VALUES('req4','arithmetic',NULL,'train','chat',NULL,X'010000000200000003000000',3,'185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25);
INSERT INTO "requests" VALUES('req9','arithmetic',NULL,'train','chat',NULL,X'010000000200000003000000',3,'185cf3905d0386f62908d150519471623c53362176f41f421e5a5242de8b8314','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25);
INSERT INTO "requests" VALUES('req10','arithmetic',NULL,'train','chat','req9.0',X'06000000',6,'77a6f996a0f515fd680e5d3c9bd9991e638ad9706e1cc074c560339537ad0c46','{"max_tokens":8}',X'7801AB56CA4D2D2E4E4C4F2D56B252888EAD0500319605A7','{}',NULL,NULL,'engine 1',1700000000.25);
CREATE TABLE scenarios (
	name VARCHAR NOT NULL, 
	recipe VARCHAR NOT NULL, 
	mode VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "scenarios" VALUES('arithmetic','grpo','auto',1700000000.25);
CREATE INDEX reports_batch ON reports (batch_id);
CREATE INDEX reports_group ON reports (scenario, state, group_key);
CREATE INDEX reports_queue ON reports (scenario, state, seq);
CREATE UNIQUE INDEX batches_reserved ON batches (scenario) WHERE state = 'reserved';
CREATE INDEX releases_kept ON releases (scenario, restorable, number);
CREATE INDEX releases_checkpoint ON releases (scenario, checkpoint);
CREATE INDEX ix_receipts_request_id ON receipts (request_id);
CREATE INDEX ix_evaluations_release_id ON evaluations (release_id);
CREATE INDEX ix_report_receipts_receipt_id ON report_receipts (receipt_id);
COMMIT;
